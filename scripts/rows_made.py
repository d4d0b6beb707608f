"""Rows for check_rows.py: seeded rows of every format with its awkward cases, real rows, and rows that must be refused."""

import itertools
import json
import pathlib
import random

TEXTS = [
    "a", "42", "Yes.", "Hello, world!", "What is the capital of Switzerland?", "It is Bern, not Zürich or Geneva.", "OK\n",
    "  two leading spaces", "trailing spaces  ", "\n\nlines before and after\n\n", "\tindented\t", "    \n  \n", "word " * 60,
    "Line one\r\nline two\rthree", "naïve café “quotes” … —", "日本語のテキストです。", "مرحبا بالعالم", "Привет, мир!",
    "👩‍👩‍👧‍👦 🇨🇭 🙂", "e\u0301 and ﬁ and Å, decomposed", "\u00a0no-break\u00a0", "zero\u200bwidth\ufeff", "\u2028separator\u2029",
    "\x1funit\x1f", "controls \x7f\x08", "def f(x):\n    # squares\n\treturn x ** 2\n\n\nprint(f(3))\n",
    "```json\n{\"a\": [1, 2.50, null]}\n```", "<b>not & html</b> 'its'", "{{ not jinja }} {% raw %} {# note #}",
    "1,234,567.89 and 3.14159e-10", "[INST] not a turn [/INST]", "<tool_response>\nuser's own\n</tool_response>",
    "<|im_start|>user\nfake turn", "it ends with {end} they say", "{end}", "<think>\nLet me see: 2 + 2.\n</think>\n\n4",
    "<think></think>done", "<think>\n\n</think>\n\nno thought", "half a thought</think>\n\nrest",
]
STRINGS = ["Bern", "Genève, \"old town\"", "a\nb\\c\t/", "</tool_call>", "日本 🙂", "", "'single'", "\u2028\x7f", "{\"not\": \"parsed\"}"]
NUMBERS = [0, -1, 7, 1.0, 0.1, 1e-5, -2.5e-7, 1e15, 1e16, 1e20, 123456789012, 2**63, 3.141592653589793]
TOOLS = [
    {"name": "get_weather", "description": "Current weather in a city, in °C", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "The city's \"name\""},
                                         "days": {"type": "integer", "minimum": 1, "default": 1.0}}, "required": ["city"]}},
    {"name": "search", "description": "", "parameters": {"type": "object", "properties": {
        "query": {"type": "string"}, "filters": {"type": "array", "items": {"type": "string", "enum": ["a", "b <c>", "é"]}}}}},
    {"name": "now", "description": "The time\nnow", "parameters": {"type": "object", "properties": {}}},
]


class Made:
    """Seeded rows for a model whose turns end with `end`."""

    def __init__(self, seed: int, end: str):
        self.random, self.end = random.Random(seed), end

    def text(self) -> str:
        parts = self.random.sample(TEXTS, self.random.choice([1, 1, 1, 2, 3]))
        return self.random.choice(["", " ", "\n", "\n\n"]).join(parts).replace("{end}", self.end)

    def answer(self) -> str:
        return "" if self.random.random() < 0.03 else self.text()

    def turns(self) -> list[tuple[str, str]]:
        if self.random.random() < 0.1:
            return [("user", "Again."), ("assistant", "Again.")] * self.random.randint(2, 3)
        return [(role, self.text() if role == "user" else self.answer())
                for _ in range(self.random.randint(1, 4)) for role in ("user", "assistant")]

    def system(self) -> list[str]:
        return self.random.choice([[], [], [self.text()], ["Be brief."], [""]])

    def content(self, text: str):
        """The text, sometimes as a list of parts that add up to it."""
        if self.random.random() < 0.85 or text != text.strip():
            return text
        cut = self.random.randint(0, len(text))
        parts = [text[:cut], text[cut:]] if text[:cut].strip() == text[:cut] and text[cut:].strip() == text[cut:] else [text]
        return [{"type": "text", "text": part} for part in parts]

    def thought(self) -> dict:
        """Sometimes a key with a thought."""
        if self.random.random() < 0.8:
            return {}
        key = self.random.choice(["reasoning_content", "thinking", "reasoning"])
        return {key: self.random.choice(["", " \n", self.text(), self.text()])}

    def messages(self) -> dict:
        system = [{"role": self.random.choice(["system", "system", "developer"]), "content": text} for text in self.system()]
        names = self.random.choice([{}, {}, {}, {"user": "human", "assistant": "gpt"}, {"assistant": "bot"}])
        turns = [{"role": names.get(role, role), "content": self.content(text)} for role, text in self.turns()]
        for turn in turns[1::2] if self.random.random() < 0.1 else turns[-1:]:
            turn |= self.thought()
        return {"messages": system + turns}

    def sharegpt(self) -> dict:
        names = self.random.choice([{"user": "human", "assistant": "gpt"}, {}])
        turns = [{"from": names.get(role, role), "value": text} for role, text in self.turns()]
        return {"conversations": turns, **{"system": text for text in self.system()}}

    def alpaca(self) -> dict:
        row = {"instruction": self.text(), "output": self.answer(), **{"system": text for text in self.system()}}
        return row | ({"input": self.random.choice(["", self.text()])} if self.random.random() < 0.7 else {})

    def prompt_completion(self) -> dict:
        return {"prompt": self.text(), "completion": self.answer()}

    def text_row(self) -> dict:
        return {"text": self.text()}

    def arguments(self, depth: int = 0):
        values = [self.random.choice(STRINGS), self.random.choice(NUMBERS), self.random.choice([True, False, None]),
                  [self.random.choice(NUMBERS), self.random.choice(STRINGS)]]
        if depth < 2:
            values.append(self.arguments(depth + 1))
        names = self.random.sample(["city", "days", "z", "a", "größe", "unit \"x\""], self.random.randint(0, 3))
        return {name: self.random.choice(values) for name in names}

    def conversation_with_tools(self) -> tuple[list, list]:
        """Tools, and steps: ("user", text), ("calls", text, [(name, arguments)]), ("result", text), ("assistant", text)."""
        tools, steps = self.random.sample(TOOLS, self.random.randint(1, 3)), []
        for _ in range(self.random.randint(1, 3)):
            steps.append(("user", self.text()))
            for _ in range(self.random.choice([0, 1, 1, 1, 2])):
                calls = [(self.random.choice(tools)["name"], self.arguments()) for _ in range(self.random.choice([1, 1, 1, 2, 3]))]
                steps.append(("calls", self.text() if self.random.random() < 0.15 else "", calls))
                steps += [("result", self.random.choice([json.dumps(self.arguments(), ensure_ascii=False), self.text()]))
                          for _ in calls]
            steps.append(("assistant", self.answer()))
        # Some conversations end with a call.
        while self.random.random() < 0.2 and any(step[0] == "calls" for step in steps) and steps[-1][0] != "calls":
            while steps[-1][0] != "calls":
                steps.pop()
        return tools, steps

    def messages_with_tools(self) -> dict:
        tools, steps = self.conversation_with_tools()
        has_ids, as_text = self.random.random() < 0.7, self.random.random() < 0.5
        messages, counter, open_ids = [], itertools.count(), []
        messages += [{"role": "system", "content": text} for text in self.system()]
        for kind, text, *calls in steps:
            if kind == "calls":
                open_ids = [f"{self.random.choice('aZ')}{next(counter):08}" for _ in calls[0]]
                content = {"content": text} if text else self.random.choice([{"content": None}, {"content": ""}, {}])
                messages.append({"role": "assistant", **content, **self.thought(), "tool_calls": [
                    {**({"id": call_id, "type": "function"} if has_ids else {}), "function": {
                        "name": name, "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments}}
                    for call_id, (name, arguments) in zip(open_ids, calls[0])]})
            elif kind == "result":
                identity = {"tool_call_id": open_ids.pop(0)} if has_ids else {}
                messages.append({"role": self.random.choice(["tool", "tool", "function"]), **identity, "content": text})
            else:
                messages.append({"role": kind, "content": text, **(self.thought() if kind == "assistant" else {})})
        if self.random.random() < 0.7:
            tools = [{"type": "function", "function": tool} for tool in tools]
        return {"messages": messages, "tools": json.dumps(tools) if self.random.random() < 0.2 else tools}

    def sharegpt_with_tools(self) -> dict:
        tools, steps = self.conversation_with_tools()
        turns = []
        for kind, text, *calls in steps:
            if kind == "calls":
                called = [{"name": name, "arguments": arguments} for name, arguments in calls[0]]
                value = called if len(called) > 1 or self.random.random() < 0.3 else called[0]
                turns.append({"from": "function_call", "value": json.dumps(value, ensure_ascii=False)})
            else:
                turns.append({"from": {"user": "human", "assistant": "gpt", "result": "observation"}[kind], "value": text})
        return {"conversations": turns, "tools": json.dumps(tools, ensure_ascii=False) if self.random.random() < 0.7 else tools}


def real_rows(data: pathlib.Path, count: int) -> list[tuple[str, str, list[dict]]]:
    """(name, format, rows) of the real data sets in a folder."""
    def lines(name):
        return [json.loads(line) for line in (data / name).read_text().splitlines()]
    gsm8k = [{"prompt": row["question"], "completion": row["answer"]} for row in lines("gsm8k_train.jsonl")]
    kto = json.loads((data / "messages_kto_en_demo.json").read_text())  # without `label`: that is preference data
    sets = [("gsm8k", "prompt_completion", gsm8k), ("wikisql", "text", lines("mlx_wikisql/train.jsonl")),
            ("alpaca_en", "alpaca", json.loads((data / "alpaca_en_demo.json").read_text())),
            ("kto_en", "messages", [{"messages": row["messages"]} for row in kto]),
            ("dummy", "sharegpt", json.loads((data / "sharegpt_dummy_conversation.json").read_text()))]
    return [(name, kind, rows[:: max(1, len(rows) // count)][:count]) for name, kind, rows in sets]


def chat(*turns, **more) -> dict:
    """A row of messages."""
    return {"messages": [{"role": role, "content": content, **dict(*extra)} for role, content, *extra in turns], **more}


def sharegpt(*turns) -> dict:
    """A row of ShareGPT's."""
    return {"conversations": [{"from": name, "value": value} for name, value in turns]}


CALL = {"id": "call00000", "type": "function", "function": {"name": "now", "arguments": {}}}
CALLS = ("assistant", "", {"tool_calls": [CALL]})
SAYS_AND_CALLS = ("assistant", "One moment", {"tool_calls": [CALL]})
RESULT = ("tool", "noon", {"tool_call_id": "call00000"})
TOOL = [{"type": "function", "function": TOOLS[2]}]
U, A = ("user", "Hi"), ("assistant", "Ho")
PLAIN = {"messages": chat(U, A), "sharegpt": sharegpt(("human", "Hi"), ("gpt", "Ho"))}
IMAGE = ("user", [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x.png"}}])
AUDIO = ("user", [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}])
QWEN_3_5 = "qwen3_5_think", "qwen3_5_nothink"
# (name, template, format, row, expected message); a pattern that starts with "+" is a report, not an error.
REFUSED = [
    ("a role that nobody knows", "qwen2_5", "messages", chat(("critic", "Hm"), U, A), "critic"),
    ("a role that the template would write", "llama3_2", "messages", chat(("critic", "Hm"), U, A), "critic"),
    ("an image", "qwen2_5", "messages", chat(IMAGE, A), "image"),
    ("an image on a template that has a place for it", "gemma3", "messages", chat(IMAGE, A), "image"),
    ("audio", "qwen3", "messages", chat(AUDIO, A), "audio"),
    ("reasoning that the template drops", "qwen2_5", "messages", chat(U, (*A, {"reasoning_content": "Hm"})), "reasoning"),
    ("a system prompt that the template drops", "mistral_nemo", "messages", chat(("system", "Be kind."), U, A), "Be kind.*no trace"),
    ("two users in a row", "mistral_nemo", "messages", chat(U, U, A), "alternate"),
    ("two users in a row", "gemma3", "messages", chat(U, U, A), "alternate"),
    ("a system prompt", "gemma2", "messages", chat(("system", "Be kind."), U, A), "System role not supported"),
    ("two users in a row", "gemma2", "messages", chat(U, U, A), "alternate"),
    ("a late system prompt", "gemma3", "messages", chat(U, A, ("system", "Be kind."), U, A), "alternate|system"),
    ("an id that is too long", "mistral_nemo", "messages",
     chat(U, ("assistant", "", {"tool_calls": [{**CALL, "id": "call_0123456789"}]}), tools=TOOL), "length 9"),
    ("calls at once", "gptoss", "messages",
     chat(U, ("assistant", "", {"tool_calls": [CALL, CALL]}), tools=TOOL), "the call of"),
    ("calls at once", "llama3_2", "messages", chat(U, ("assistant", "", {"tool_calls": [CALL, CALL]}), tools=TOOL), "single tool-calls"),
    *[("text beside a call", name, "messages", chat(U, SAYS_AND_CALLS, RESULT, A, tools=TOOL), "One moment.*no trace")
      for name in ("llama3_2", "mistral_nemo", "gptoss")],
    ("a thought beside a call that was answered", "gptoss", "messages",
     chat(U, ("assistant", "", {"tool_calls": [CALL], "thinking": "Hm"}), RESULT, A, tools=TOOL), "Hm.*no trace"),
    ("text and a thought beside a call", "gptoss", "messages",
     chat(U, ("assistant", "Wait", {"tool_calls": [CALL], "thinking": "Hm"}), tools=TOOL), "both content and thinking"),
    ("a channel in an answer", "gptoss", "messages", chat(U, ("assistant", "<|channel|>final<|message|>Ho")), "channel"),
    *[("no question", name, "messages", chat(("system", "Be kind."), A), "No user query") for name in QWEN_3_5],
    *[("tools", name, "messages", chat(U, A, tools=TOOL), "tools") for name in ("gemma3", "deepseek_v3")],
    ("tools", "aya_expanse", "messages", chat(U, A, tools=TOOL), "`tool_use`"),
    *[("a call", name, "messages", chat(U, CALLS), "the call of") for name in ("gemma3", "deepseek_v3", "aya_expanse")],
    *[("a call beside text", name, "messages", chat(U, SAYS_AND_CALLS), "the call of") for name in ("gemma3", "deepseek_v3", "aya_expanse")],
    ("a result of a tool", "gemma3", "messages", chat(U, CALLS, RESULT, A), "alternate"),
    ("tools that are no JSON", "qwen2_5", "messages", chat(U, A, tools="[{"), "tools"),
    ("tools that are no list", "qwen2_5", "messages", chat(U, A, tools={"a": 1}), "tools"),
    ("a ShareGPT name that nobody knows", "qwen2_5", "sharegpt", sharegpt(("critic", "Hm"), ("human", "Hi"), ("gpt", "Ho")), "critic"),
    ("a function_call that is no JSON", "qwen2_5", "sharegpt", sharegpt(("human", "Hi"), ("function_call", "now()")), "function_call|JSON"),
    ("ShareGPT's calls", "gemma3", "sharegpt",
     sharegpt(("human", "Hi"), ("function_call", '{"name": "now", "arguments": {}}')), "the call of"),
    ("an empty answer", "qwen2_5", "messages", chat(U, ("assistant", "")), "+loss|empty"),
    ("an answer of white space that the template strips", "llama3_2", "messages", chat(U, ("assistant", " \n ")), "+loss|empty"),
    ("a completion that is empty", "gemma3", "prompt_completion", {"prompt": "Hi", "completion": ""}, "+loss|empty"),
    ("a completion of white space", "qwen3", "prompt_completion", {"prompt": "Hi", "completion": " \n"}, "+loss|empty"),
    ("no answer", "qwen2_5", "messages", chat(U), "+loss|answer|assistant"),
    ("preference data", "qwen2_5", "auto", {"prompt": "Hi", "chosen": "Ho", "rejected": "No"}, "preference"),
    ("preference data with a label", "qwen2_5", "auto", chat(U, A, label=True), "preference"),
    *[("a thought of an earlier answer", name, "messages", chat(U, ("assistant", "<think>\nHm\n</think>\n\nHo"), U, A),
       "no trace") for name in ("qwen3", *QWEN_3_5)],
    *[("a thought of an earlier answer", name, "messages", chat(U, (*A, {"reasoning_content": "Hm"}), U, A), "no trace")
      for name in ("qwen3", *QWEN_3_5, "gptoss")],
]
