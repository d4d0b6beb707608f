"""Judges answers by the functions of a file, as TRL calls them: a line of JSON in for each round, one out."""
# Seconds in which the answer that a function fails at is looked for.
SEARCH_SECONDS = 10


class Failed(Exception):
    """A function has failed for the reason that is its cause, at one answer or at all of them together."""

    def __init__(self, function, index=None):
        self.function, self.index = function, index


def call(function, batch, chosen, more):
    """What a function says of the chosen answers."""
    of = lambda values: [values[index] for index in chosen]
    columns = {name: of(values) for name, values in batch["columns"].items()}
    own = {name: of(batch[name]) for name in ("prompts", "completions", "completion_ids")}
    return function(**own, **columns, **more)


def numbers(function, values, count):
    """A number or None for each answer."""
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    if len(values) != count:
        raise ValueError(f"{len(values)} rewards for {count} completions")
    for index, value in enumerate(values):
        try:
            value = None if value is None else float(value)
            if value is not None and math.isinf(value):
                raise ValueError(f"a reward of {value}")
        except Exception as error:
            raise Failed(function, index) from error
        values[index] = None if value is None or math.isnan(value) else value
    return values


def index_of_failure(function, batch, more):
    """The first answer that the function fails at alone."""
    end = time.monotonic() + SEARCH_SECONDS
    for index in range(len(batch["completions"])):
        if time.monotonic() > end:
            return None
        try:
            call(function, batch, [index], more)
        except Exception:
            return index
    return None


async def gathered(waiting):
    """What coroutines say, which wait beside one another, with the seconds that each took."""

    async def timed(name, awaitable, start):
        try:
            return name, await awaitable, time.perf_counter() - start
        except (Exception, SystemExit) as error:
            raise Failed(name) from error

    return await asyncio.gather(*(timed(*one) for one in waiting))


def judged(functions, batch, loop):
    """The answer to a line."""
    count, logged, extra = len(batch["completions"]), {}, {}

    def log_metric(name, value):
        logged.setdefault(str(name), []).append(float(value))

    def log_extra(column, values):
        is_plain = lambda value: value is None or isinstance(value, (int, float)) and math.isfinite(value)
        extra[str(column)] = [value if is_plain(value) else str(value) for value in values]

    state = types.SimpleNamespace(**batch["state"])
    more = {"trainer_state": state, "log_metric": log_metric, "log_extra": log_extra}
    given, seconds, waiting = {}, {}, []
    for name, function in functions.items():
        start = time.perf_counter()
        try:
            given[name] = call(function, batch, range(count), more)
        except Exception as error:
            raise Failed(name, index_of_failure(function, batch, more)) from error
        except BaseException as error:
            raise Failed(name) from error
        seconds[name] = time.perf_counter() - start
        if inspect.isawaitable(given[name]):
            waiting.append((name, given[name], start))
    for name, values, took in loop.run_until_complete(gathered(waiting)) if waiting else []:
        given[name], seconds[name] = values, took
    rewards = {}
    for name in functions:
        try:
            rewards[name] = numbers(name, given[name], count)
        except (TypeError, ValueError) as error:
            raise Failed(name) from error
    metrics = {name: sum(values) / len(values) for name, values in logged.items()}
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return {"rewards": rewards, "seconds": seconds, "metrics": metrics, "extra": extra}


def main(path, *names):
    inbox, say = pipes()
    lines, loop = queue.Queue(), asyncio.new_event_loop()
    try:
        functions = loaded(path, names)
    except BaseException as error:
        return say(described(error))
    threading.Thread(target=read_ahead, args=(inbox, lines.put), daemon=True).start()
    say({"hello": 1, "python": sys.version.split()[0]})
    for line in iter(lines.get, None):
        batch = json.loads(line)
        try:
            answer = judged(functions, batch, loop)
        except Failed as failed:
            answer = {"function": failed.function, "index": failed.index, **described(failed.__cause__)}
        say({"id": batch["id"], **answer})


main(*sys.argv[1:])
