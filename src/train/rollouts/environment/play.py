"""Plays episodes by a class or by functions of a file, as TRL takes them for `environment_factory` and `tools`: a line of JSON in for
each turn, one out."""
JSON_TYPES = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", tuple: "array", dict: "object", type(None): "null",
}


def hint_schema(hint):
    """The JSON schema of a type hint."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, getattr(types, "UnionType", typing.Union)):
        schemas = [hint_schema(one) for one in inner if one is not type(None)]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        return {**schema, "nullable": True} if type(None) in inner else schema
    if origin is typing.Literal:
        return {"type": JSON_TYPES[type(inner[0])], "enum": list(inner)}
    schema = {"type": JSON_TYPES[origin or hint]} if (origin or hint) in JSON_TYPES else {}
    if origin is list and inner:
        schema["items"] = hint_schema(inner[0])
    elif origin is dict and len(inner) == 2:
        schema["additionalProperties"] = hint_schema(inner[1])
    return schema


def definition(function):
    """A function as a chat template is told of it: by its type hints and its docstring, with a section `Args:`."""
    said, _, rest = (inspect.getdoc(function) or "").partition("Args:")
    said = re.split(r"\n\s*(?:Returns|Raises):", said)[0].strip()
    if not said:
        raise TypeError(f"`{function.__name__}` is a tool and has no docstring, by which the model knows it")
    lines = re.split(r"\n\s*(?:Returns|Raises):", rest)[0]
    told, name, indent = {}, None, None
    for line in lines.splitlines():
        found = re.match(r"(\s*)(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
        if found and (indent is None or len(found[1]) <= indent):
            indent, name = len(found[1]), found[2]
            told[name] = found[3]
        elif name:
            told[name] += " " + line
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        properties[name] = hint_schema(hints.get(name))
        if name in told:
            properties[name]["description"] = " ".join(told[name].split())
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    return {"type": "function", "function": {"name": function.__name__, "description": said, "parameters": parameters}}


async def finished(value):
    return await value if inspect.isawaitable(value) else value


async def result_of(function, name, arguments):
    """What a tool gives, and whether it has failed: that is an observation, too."""
    try:
        if function is None:
            raise ValueError(f"Tool {name} not found.")
        return str(await finished(function(**arguments))), False
    except Exception as error:
        return str({"error": str(error)}), True


class Players:
    """The episodes that are being played; an instance of the class plays one after the other."""

    def __init__(self, factory, functions):
        self.factory, self.functions = factory, functions
        self.playing, self.free, self.methods, self.scores = {}, [], [], False
        if factory is not None:
            self.free.append(factory())
            kind = type(self.free[0])
            if not callable(getattr(kind, "reset", None)):
                raise TypeError(f"{kind.__name__} has no method `reset`")
            names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
            self.methods = [name for name in names if name not in ("reset", "get_reward")]
            self.scores = "get_reward" in names

    def hello(self, name):
        tools = [*self.functions.values(), *(getattr(self.free[0], name) for name in self.methods)]
        waits = any(inspect.iscoroutinefunction(function) for function in [*tools, getattr(self.factory, "reset", None)])
        return {"hello": 1, "name": name, "tools": [definition(tool) for tool in tools],
                "max_parallel": 1024 if waits else 1, "scores_at_close": self.scores}

    async def reset(self, number, row, **_):
        if self.factory is None:
            return {}
        player = self.free.pop() if self.free else self.factory()
        wanted = inspect.signature(player.reset).parameters.values()
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in wanted):
            row = {parameter.name: row[parameter.name] for parameter in wanted if parameter.name in row}
        said = await finished(player.reset(**row))
        self.playing[number] = player
        return {} if said is None else {"observation": said}

    async def step(self, number, message, **_):
        player, waiting = self.playing.get(number), []
        for call in message.get("tool_calls") or []:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            own = getattr(player, name) if name in self.methods else self.functions.get(name)
            waiting.append((name, result_of(own, name, arguments)))
        results = await asyncio.gather(*(result for _, result in waiting))
        said = [{"role": "tool", "name": name, "content": text} for (name, _), (text, _) in zip(waiting, results)]
        return {"observation": said, "done": not said, "failed_calls": sum(failed for _, failed in results)}

    async def close(self, number, ended=None, **_):
        player = self.playing.pop(number, None)
        if player is None or ended == "failed":  # It may be in any state.
            return {}
        reward = await finished(player.get_reward()) if self.scores else None
        reward = math.nan if reward is None else float(reward)
        if math.isinf(reward):
            raise ValueError(f"a reward of {reward}")
        self.free.append(player)
        return {"reward": None if math.isnan(reward) else reward}


async def serve(players, inbox, say):
    lines, loop, tasks = asyncio.Queue(), asyncio.get_running_loop(), set()
    put = lambda line: loop.call_soon_threadsafe(lines.put_nowait, line)
    threading.Thread(target=read_ahead, args=(inbox, put), daemon=True).start()

    async def play(line):
        question = json.loads(line)
        number, do = question.pop("id"), question.pop("do")
        try:
            answer = await getattr(players, do)(number, **question)
        except (Exception, SystemExit) as error:
            told = described(error)
            print(told["traceback"] or told["error"], file=sys.stderr, flush=True)
            answer = {"failed": told["error"]}
        say({"id": number, **answer})

    while (line := await lines.get()) is not None:
        tasks.add(task := asyncio.ensure_future(play(line)))
        task.add_done_callback(tasks.discard)


def main(path, factory, *names):
    inbox, say = pipes()
    try:
        functions = loaded(path, [factory, *names] if factory else names)
        players = Players(functions.pop(factory, None), functions)
        say(players.hello(factory or os.path.splitext(os.path.basename(path))[0]))
    except BaseException as error:
        return say(described(error))
    asyncio.run(serve(players, inbox, say))


main(*sys.argv[1:])
