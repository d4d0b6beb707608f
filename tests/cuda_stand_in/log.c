/* What is told while a program runs (stderr, the trace), and the log at its end. */
#include "driver.h"
#include <stdarg.h>
#include <time.h>

FILE *trace;
double started;

void say(const char *format, ...) {
    if (cfg.quiet) return;
    va_list a; va_start(a, format);
    fputs("stand-in: ", stderr); vfprintf(stderr, format, a); fputc('\n', stderr);
    va_end(a);
}

void tell(const char *format, ...) {
    if (!trace) return;
    fprintf(trace, "%.6f ", now() - started);
    va_list a; va_start(a, format); vfprintf(trace, format, a); va_end(a);
    fputc('\n', trace);
}

/* -- counts ---------------------------------------------------------------------------------------------- */

typedef struct Count { const char *name; u64 n, bytes; } Count;
static Count counts[128];
static int num_counts;

void count(const char *name, u64 bytes) {
    int i = 0;
    while (i < num_counts && strcmp(counts[i].name, name)) i++;
    if (i == 128) return;
    if (i == num_counts) counts[num_counts++].name = name;
    counts[i].n++; counts[i].bytes += bytes;
}

/* -- the log --------------------------------------------------------------------------------------------- */

static void json_text(FILE *f, const char *s) {
    fputc('"', f);
    for (; *s; s++) {
        if (*s == '"' || *s == '\\') fprintf(f, "\\%c", *s);
        else if ((u8)*s < 32) fputc(' ', f);
        else fputc(*s, f);
    }
    fputc('"', f);
}

/* What all threads of this process took. */
static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void write_log(void) {
    if (trace) fflush(trace);
    const char *path = env("STAND_IN_LOG", "");
    if (!*path) return;
    FILE *f = fopen(path, "w");
    if (!f) return;
    fprintf(f, "{\"compute_capability\": \"%d.%d\", \"driver\": %d, \"order\": \"%s\",\n", cfg.major, cfg.minor,
            cfg.driver, cfg.lazy ? "lazy" : "issue");
    fprintf(f,
            "\"wall_s\": %.3f, \"kernels_run_s\": %.3f, \"translate_s\": %.3f, \"ptxas_s\": %.3f, \"modules\": %llu, "
            "\"ptx_refused\": %llu, \"not_translated\": %llu, \"refused_launches\": %llu,\n",
            now() - started, run_s, translate_s, ptxas_s, (unsigned long long)num_modules,
            (unsigned long long)ptx_refused, (unsigned long long)not_translated, (unsigned long long)refused_launches);
    fprintf(f,
            "\"cpu_s\": %.3f, \"launches_run\": %llu, \"device_bytes_peak\": %llu, \"device_allocations\": %llu, "
            "\"pinned_bytes_peak\": "
            "%llu, \"fault\": ",
            cpu_seconds(), (unsigned long long)num_executed, (unsigned long long)peak_used,
            (unsigned long long)num_allocs, (unsigned long long)pinned_peak);
    json_text(f, sticky_text);
    fprintf(f, ",\n\"calls\": {");
    for (int i = 0; i < num_counts; i++)
        fprintf(f, "%s\n  \"%s\": {\"count\": %llu, \"bytes\": %llu}", i ? "," : "", counts[i].name,
                (unsigned long long)counts[i].n, (unsigned long long)counts[i].bytes);
    fprintf(f, "},\n\"notes\": [");
    for (int i = 0; i < simt_num_notes; i++) {
        fprintf(f, "%s\n  {\"count\": %llu, \"what\": ", i ? "," : "", simt_notes[i].count);
        json_text(f, simt_notes[i].text);
        fputc('}', f);
    }
    fprintf(f, "],\n\"kernels\": [");
    int first = 1;
    for (Module *m = modules; m; m = m->next) {
        Kernel none = {0}; none.module = m;
        Kernel *k = m->kernels ? m->kernels : &none;
        for (; k; k = k->next) {
            fprintf(f, "%s\n  {\"hash\": \"%016llx\", \"name\": ", first ? "" : ",", (unsigned long long)m->hash);
            json_text(f, k->name);
            fprintf(f,
                    ", \"launches\": %llu, \"blocks\": %llu, \"threads\": %llu, \"seconds\": %.6f, \"last_grid\": [%u, "
                    "%u, %u], \"block\": [%u, %u, %u], \"dynamic_shared\": %u, \"ptx_bytes\": %zu, \"registers\": %d, "
                    "\"stack\": %d, \"spill_stores\": %d, \"spill_loads\": %d, \"static_shared\": %d, \"ptxas_s\": "
                    "%.3f, \"translate_s\": %.3f, \"cut_short\": %llu, \"error\": ",
                    (unsigned long long)k->launches, (unsigned long long)k->blocks, (unsigned long long)k->threads,
                    k->seconds, k->grid[0], k->grid[1], k->grid[2], k->block[0], k->block[1], k->block[2], k->shared,
                    strlen(m->text), m->regs, m->stack, m->spill_st, m->spill_ld, m->static_shared, m->ptxas_s,
                    m->translate_s, (unsigned long long)k->cut);
            json_text(f, m->error);
            fputc('}', f);
            first = 0;
        }
    }
    fprintf(f, "]}\n");
    fclose(f);
}
