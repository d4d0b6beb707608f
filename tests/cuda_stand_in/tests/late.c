#include "check.h"
#include <sys/wait.h>
#include <unistd.h>
enum { RIGHT, NAN_SUMS, FAULT };

/* Runs a kernel in a process of its own: a fault stays. */
static int outcome(const char *name, int wrong) {
    fflush(stdout);
    int status;
    if (!fork()) {
        freopen("/dev/null", "w", stderr);
        static float got[512];
        ptr out = device(got, sizeof got);
        launch(kernel(load("late.ptx"), name), 1, 128, 0, (void *[]){&out, &wrong});
        if (cuMemcpyDtoH_v2(got, out, sizeof got)) _exit(FAULT);
        int right = 0, nans = 0;
        for (int i = 0; i < 512; i++) right += got[i] == 33, nans += got[i] != got[i];
        _exit(right == 512 ? RIGHT : nans == 512 ? NAN_SUMS : -1);
    }
    wait(&status);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int main(void) {
    static const struct { const char *name; int wrong, expected; const char *what; } cases[] = {
        {"late", 0, RIGHT, "as it should be"},
        {"late", 1, RIGHT, "fence of another thread after a barrier"},
        {"late", 2, FAULT, "wgmma reads without fence.proxy.async"},
        {"late", 3, FAULT, "no wgmma.fence"},
        {"late", 4, FAULT, "operand is written before the wait"},
        {"late", 5, NAN_SUMS, "wait for an earlier group only"},
        {"late", 6, NAN_SUMS, "no wait"},
        {"store", 0, RIGHT, "as it should be"},
        {"store", 1, FAULT, "bulk store without fence.proxy.async"},
    };
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        int found = outcome(cases[i].name, cases[i].wrong);
        EXPECT(found == cases[i].expected, "%s, %s: %d, expected %d", cases[i].name, cases[i].what, found, cases[i].expected);
    }
    return report();
}
