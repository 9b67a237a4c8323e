/* A step: all calls of all layers one after another, in one parallel region.
 *
 * The first thread to come leads. It makes the calls, and where one shares its work, the others join in if they are
 * there: nobody waits for a thread that the system runs later. Who finds nothing to do spins for a moment, then sleeps.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vectors.h"

#define PAUSES 2000       /* before a thread sleeps: some tens of microseconds */
#define IS_OPEN 0x80u     /* a door is the round, whether it may be joined, whether it is the last, and who is inside */
#define IS_OVER 0x40u
#define NUM_INSIDE 0x3fu
#define ROUND 0x100u

struct team {
    const struct step *step;
    void (*body)(void *);
    void *data;
    atomic_uint door;
    atomic_int num_come, num_asleep;
};

static _Thread_local struct team *led;

static void wake(struct team *team)
{
    if (atomic_load(&team->num_asleep))
        syscall(SYS_futex, &team->door, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static void sleep_at(struct team *team, unsigned door)
{
    atomic_fetch_add(&team->num_asleep, 1);
    syscall(SYS_futex, &team->door, FUTEX_WAIT_PRIVATE, door, NULL, NULL, 0);
    atomic_fetch_sub(&team->num_asleep, 1);
}

static void join_in(struct team *team)
{
    unsigned last = 0;
    for (int pauses = 0;;) {
        unsigned door = atomic_load(&team->door);
        if (door & IS_OVER)
            return;
        int is_new = (door & IS_OPEN) && door / ROUND != last;
        if (is_new && atomic_compare_exchange_strong(&team->door, &door, door + 1)) {
            team->body(team->data);
            atomic_fetch_sub(&team->door, 1);
            last = door / ROUND;
            pauses = 0;
        } else if (!is_new && ++pauses > PAUSES) {
            sleep_at(team, door);
            pauses = 0;
        } else {
            pause_briefly();
        }
    }
}

/* As GOMP_parallel, within the region of the thread that leads. */
static void in_team(void (*body)(void *), void *data, unsigned num_threads, unsigned flags)
{
    struct team *team = led;
    (void)num_threads, (void)flags;
    team->body = body;
    team->data = data;
    atomic_fetch_add(&team->door, ROUND | IS_OPEN);
    wake(team);
    body(data);
    unsigned door = atomic_fetch_sub(&team->door, IS_OPEN) - IS_OPEN;
    for (int pauses = 0; door & NUM_INSIDE; door = atomic_load(&team->door))
        if (++pauses > PAUSES)
            sched_yield();
        else
            pause_briefly();
}

static void run_product(const struct product *with, const struct step *step)
{
    struct product product = *with;
    product.num_rows = step->num_rows;
    product.num_threads = step->layout->num_threads;
    product.parallel = in_team;
    product.workspace = step->workspace;
    penstock_multiply(&product);
}

static void run_store(const struct store *with, const struct attention *layout)
{
    struct store store = *with;
    store.query_starts = layout->query_starts, store.context_lens = layout->context_lens;
    store.blocks = layout->blocks, store.block_starts = layout->block_starts;
    store.num_chunks = layout->num_chunks, store.num_threads = layout->num_threads;
    store.parallel = in_team;
    penstock_store(&store);
}

static void run_attend(const struct attention *with, const struct attention *layout)
{
    struct attention attention = *layout;
    attention.queries = with->queries, attention.out = with->out;
    attention.keys = with->keys, attention.values = with->values, attention.sinks = with->sinks;
    attention.num_heads = with->num_heads, attention.window = with->window;
    attention.scale = with->scale, attention.softcap = with->softcap;
    attention.parallel = in_team;
    penstock_attend(&attention);
}

static void run_norm(const struct norm *with, const struct step *step)
{
    struct norm norm = *with;
    norm.num_outer = step->num_rows, norm.num_threads = step->layout->num_threads;
    norm.parallel = in_team;
    penstock_rms_norm(&norm);
}

static void run_gate(const struct gate *with, const struct step *step)
{
    struct gate gate = *with;
    gate.num_rows = step->num_rows, gate.num_threads = step->layout->num_threads;
    gate.parallel = in_team;
    penstock_gated_activation(&gate);
}

static void run_route(const struct routing *with, const struct step *step)
{
    struct routing routing = *with;
    routing.num_tokens = step->num_rows, routing.num_threads = step->layout->num_threads;
    routing.parallel = in_team;
    penstock_route(&routing);
}

static void run_mix(const struct mixture *with, const struct step *step)
{
    struct mixture mixture = *with;
    mixture.num_tokens = step->num_rows, mixture.num_threads = step->layout->num_threads;
    mixture.parallel = in_team;
    mixture.workspace = step->workspace;
    penstock_mix(&mixture);
}

static void run_calls(const struct step *step)
{
    for (const struct call *call = step->calls; call < step->calls + step->num_calls; call++)
        switch (call->kind) {
        case NORM: run_norm(call->with, step); break;
        case PRODUCT: run_product(call->with, step); break;
        case STORE: run_store(call->with, step->layout); break;
        case ATTENTION: run_attend(call->with, step->layout); break;
        case GATE: run_gate(call->with, step); break;
        case ROUTING: run_route(call->with, step); break;
        case MIXTURE: run_mix(call->with, step); break;
        }
}

static void run_team(void *data)
{
    struct team *team = data;
    if (atomic_fetch_add(&team->num_come, 1)) {
        join_in(team);
        return;
    }
    led = team;
    run_calls(team->step);
    led = NULL;
    atomic_fetch_add(&team->door, IS_OVER);
    wake(team);
}

void penstock_run_step(const struct step *step)
{
    struct team team = {.step = step};
    int num_threads = smaller(step->layout->num_threads, NUM_INSIDE);
    if (num_threads > 1)
        step->layout->parallel(run_team, &team, num_threads, 0);
    else
        run_team(&team);
}
