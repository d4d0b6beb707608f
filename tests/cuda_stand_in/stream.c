/* Streams and events. */
#include "driver.h"
#include <stdlib.h>

/* -- streams: queues of work ----------------------------------------------------------------------------- */

static Stream *streams; static Stream default_stream;
static int num_streams;
static u64 tickets;
double modelled;   /* the device's clock in seconds, where it is not that of this machine */
int trial_is_over;   /* STAND_IN_EXEC=trial: a result was read back, from now on memory stays as it is */

static void run_op(Op *op) {
    int moves = op->kind == COPY || op->kind == COPY2D || op->kind == SET;
    if (sticky && op->kind != RECORD && op->kind != RELEASE) return;
    if (trial_is_over && moves && !op->is_to_host) return;
    if (cfg.execute == TRIAL && op->is_to_host) trial_is_over = 1;
    switch (op->kind) {
    case LAUNCH: run_kernel(op); break;
    case COPY: memmove(op->dst, op->staged ? op->staged : op->src, op->bytes); break;
    case COPY2D:
        for (size_t y = 0; y < op->two.height; y++)
            memmove((u8 *)op->dst + y * op->two.dst_pitch,
                    (const u8 *)(op->staged ? op->staged : op->src) + y * op->two.src_pitch, op->two.width);
        break;
    case SET:
        for (size_t i = 0; i < op->bytes; i++)
            memcpy((u8 *)op->dst + i * (size_t)op->unit, &op->value, (size_t)op->unit);
        break;
    case RECORD:
        if (op->event->done < op->ticket) op->event->done = op->ticket;
        op->event->at = cfg.clock == REAL ? now() : modelled;
        break;
    case WAIT:
        run_until(op->dst, op->until);
        break; /* up to the record that was the last one when the wait was asked for */
    case RELEASE: release((u64)op->dst); break;
    }
}

/* Runs a stream until the operation `ticket` is done, or all. */
void run_until(Stream *s, u64 ticket) {
    while (s->head && s->head->ticket <= ticket) {
        Op *op = s->head;
        s->head = op->next;
        if (!s->head) s->tail = 0;
        run_op(op);
        free(op->params); free(op->staged); free(op);
    }
}

Stream *stream_of(void *handle) { return handle && (u64)handle > 2 ? handle : &default_stream; }

CUresult enqueue(void *handle, Op given) {
    Stream *s = stream_of(handle);
    if (given.kind == WAIT && !given.until) return OK;   /* nothing was recorded */
    Op *op = malloc(sizeof *op);
    *op = given;
    op->ticket = ++tickets;
    op->next = 0;
    if (given.kind == RECORD) { given.event->ticket = op->ticket; given.event->stream = s; }
    if (s->tail) s->tail->next = op; else s->head = op;
    s->tail = op;
    if (!cfg.lazy) run_until(s, ~0ull);
    return OK;
}

CUresult sync_all(void) {
    run_until(&default_stream, ~0ull);
    for (Stream *s = streams; s; s = s->next) run_until(s, ~0ull);
    return sticky;
}

/* -- API: streams and events ----------------------------------------------------------------------------- */

static CUresult make_stream(void **out) {
    Stream *s = calloc(1, sizeof *s);
    s->next = streams; s->number = ++num_streams; streams = s;
    tell("new stream %d", s->number);
    *out = s;
    return OK;
}
API CUresult cuStreamCreate(void **s, unsigned flags) { (void)flags; ENTER(0) LEAVE(make_stream(s)); }
API CUresult cuStreamCreateWithPriority(void **s, unsigned flags, int priority) {
    (void)flags;
    (void)priority;
    ENTER(0) LEAVE(make_stream(s));
}
API CUresult cuStreamDestroy_v2(void *s) { ENTER(0) run_until(stream_of(s), ~0ull); LEAVE(OK); }
API CUresult cuStreamSynchronize(void *s) {
    ENTER(0) tell("sync stream %d", stream_of(s)->number);
    run_until(stream_of(s), ~0ull);
    LEAVE(sticky);
}
API CUresult cuStreamQuery(void *s) { ENTER(0) LEAVE(stream_of(s)->head ? NOT_READY : OK); }
API CUresult cuStreamWaitEvent(void *s, Event *e, unsigned flags) {
    (void)flags;
    ENTER(0) Op op = {.kind = WAIT, .dst = e->stream, .until = e->ticket};
    LEAVE(enqueue(s, op));
}
API CUresult cuStreamIsCapturing(void *s, int *v) { (void)s; *v = 0; return OK; }
API CUresult cuStreamBeginCapture_v2(void *s, int mode) { (void)s; (void)mode; return NOT_SUPPORTED; }
API CUresult cuStreamEndCapture(void *s, void **g) { (void)s; *g = 0; return NOT_SUPPORTED; }
API CUresult cuEventCreate(Event **e, unsigned flags) { (void)flags; ENTER(0) *e = calloc(1, sizeof **e); LEAVE(OK); }
API CUresult cuEventDestroy_v2(Event *e) {
    ENTER(0)
    /* An event may be destroyed while its record or a wait for it is still queued. */
    if (e->ticket > e->done && e->stream) run_until(e->stream, e->ticket);
    (void)e;   /* kept: a queued wait may name it */
    LEAVE(OK);
}
API CUresult cuEventRecord(Event *e, void *s) { ENTER(0) Op op = {.kind = RECORD, .event = e}; LEAVE(enqueue(s, op)); }
API CUresult cuEventSynchronize(Event *e) {
    ENTER(0) tell("sync event");
    if (e->stream) run_until(e->stream, e->ticket);
    LEAVE(sticky);
}
API CUresult cuEventQuery(Event *e) {
    ENTER(0)
    if (e->ticket <= e->done) LEAVE(OK);
    if (e->stream) run_until(e->stream, e->ticket);   /* who asks again waits for it */
    LEAVE(NOT_READY);
}
static CUresult elapsed(float *ms, Event *a, Event *b) {
    if (a->stream) run_until(a->stream, a->ticket);
    if (b->stream) run_until(b->stream, b->ticket);
    *ms = (float)((b->at - a->at) * 1e3);
    return sticky;
}
API CUresult cuEventElapsedTime(float *ms, Event *a, Event *b) { ENTER(0) LEAVE(elapsed(ms, a, b)); }
API CUresult cuEventElapsedTime_v2(float *ms, Event *a, Event *b) { ENTER(0) LEAVE(elapsed(ms, a, b)); }
API CUresult cuLaunchHostFunc(void *s, void (*fn)(void *), void *data) {
    ENTER(0) run_until(stream_of(s), ~0ull);
    pthread_mutex_unlock(&lock);
    fn(data);
    return OK;
}
