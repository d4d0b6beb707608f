"""Holds `lora-train serve` against OpenAI's own client and, with --chromium, its page against a browser.

    scripts/check_serve.py http://127.0.0.1:8000 [--chromium] [--speed] [--tools] [--image FILE]

Prints one JSON object: the greedy texts of every model, or with --speed the tokens a second of one and of eight requests. With
--tools only calls are tried, and the first model must answer by calling `met` with a snail on the hill. With --image the first model is
shown one.
"""

import argparse
import base64
import json
import math
import pathlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pydantic
from pydantic import conint, conlist

PROMPT = "Once upon a time"
ABOUT_IMAGE = "What is this?"
MESSAGES = [{"role": "user", "content": "Max saw a snail on the hill. Olga gave him a brown basket."}]


def check(condition, what):
    if not condition:
        raise SystemExit(f"error: {what}")


def refused(kind, call, **arguments):
    try:
        call(**arguments)
    except kind as error:
        return error
    raise SystemExit(f"error: {arguments} is not refused")


def interface(client, models):
    first = models[0]
    completion = {"model": first, "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**completion)
    text = whole.choices[0].text
    parts = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **completion))
    check("".join(part.choices[0].text for part in parts if part.choices) == text, "a stream has another text")
    check(parts[-1].usage == whole.usage and whole.usage.prompt_tokens > 0, f"usage {parts[-1].usage}, {whole.usage}")
    word = text.split()[2]
    stopped = client.completions.create(stop=[word, "\n\n\n"], **completion).choices[0]
    check((stopped.text, stopped.finish_reason) == (text[: text.index(word)], "stop"), f"stop: {stopped}")
    short = client.completions.create(**{**completion, "max_tokens": 2}).choices[0]
    check(short.finish_reason == "length", f"max_tokens: {short}")

    drawn = {**completion, "temperature": 1.5, "top_p": 0.95}
    draw = lambda seed: client.completions.create(seed=seed, **drawn).choices[0].text
    check(draw(1) == draw(1) and len({draw(seed) for seed in range(4)}) > 1, "seeds")

    logprobs = client.completions.create(logprobs=3, **completion).choices[0].logprobs
    check(all(logprob <= 0 and len(top) == 3 for logprob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs)),
          f"logprobs {logprobs}")
    check(all(math.isclose(max(top.values()), chosen) for chosen, top in
              zip(logprobs.token_logprobs, logprobs.top_logprobs)), "the greedy token is not the most likely one")

    chat = {"model": first, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    answer = client.chat.completions.create(logprobs=True, top_logprobs=2, **chat).choices[0]
    streamed = list(client.chat.completions.create(stream=True, **chat))
    check(streamed[0].choices[0].delta.role == "assistant", "the first part names no role")
    check("".join(part.choices[0].delta.content or "" for part in streamed) == answer.message.content, "stream of a chat")
    check(streamed[-1].choices[0].finish_reason == answer.finish_reason, "finish_reason")
    tokens = answer.logprobs.content
    check(bytes(byte for token in tokens for byte in token.bytes).decode(errors="replace") == answer.message.content,
          "the bytes of the tokens are not the text")
    check(all(len(token.top_logprobs) == 2 for token in tokens), "top_logprobs")

    check(client.models.retrieve(first).id == first, "retrieve")
    error = refused(openai.NotFoundError, client.embeddings.create, model=first, input="x")
    check("/v1/chat/completions" in error.body["message"], f"{error.body}")
    error = refused(openai.NotFoundError, client.completions.create, **{**completion, "model": "nobody"})
    check(error.code == "model_not_found" and first in error.body["message"], f"{error.body}")
    error = refused(openai.BadRequestError, client.completions.create, n=2, **completion)
    check(error.param == "n" and error.type == "invalid_request_error", f"{error.body}")
    error = refused(openai.BadRequestError, client.completions.create, **{**completion, "prompt": "word " * 20_000})
    check(error.code == "context_length_exceeded", f"{error.body}")


def held_to_json(client, model):
    """Whatever the model would write, the text is JSON of the schema, whole and in parts."""
    class Snail(pydantic.BaseModel):
        kind: Literal["red", "blue"]
        sizes: conlist(conint(ge=1, le=9), min_length=1, max_length=3)

    chat = {"model": model, "messages": MESSAGES, "seed": 3, "max_tokens": 400}
    answer = client.chat.completions.parse(response_format=Snail, **chat).choices[0]
    blanks = answer.message.content.replace(", ", ",").replace(": ", ":")
    check(not any(blank in blanks for blank in " \n\t"), f"white space: {answer.message.content!r}")
    check(answer.finish_reason == "stop" and answer.message.parsed.sizes, f"{answer}")
    with client.chat.completions.stream(response_format=Snail, **chat) as stream:
        streamed = stream.get_final_completion().choices[0].message
    check(streamed.content == answer.message.content, "a stream has other JSON")
    answer = client.chat.completions.create(response_format={"type": "json_object"}, **chat).choices[0]
    check(answer.message.content.startswith("{"), f"{answer}")
    check(answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), dict), f"{answer}")
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "format": "nonsense"}}}
    error = refused(openai.BadRequestError, client.chat.completions.create, response_format=wrong, **chat)
    check(error.param == "response_format" and "nonsense" in error.body["message"], f"{error.body}")


def calls_tools(client, model):
    """A call, whole and in parts, and the answer to its result."""
    snail = {"type": "object", "properties": {"snail": {"type": "string"}}, "required": ["snail"]}
    met = {"type": "function", "function": {"name": "met", "description": "Meets a snail.", "parameters": snail}}
    chat = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    answer = client.chat.completions.create(tools=[met], **chat).choices[0]
    check(answer.finish_reason == "tool_calls" and len(answer.message.tool_calls) == 1, f"{answer}")
    call = answer.message.tool_calls[0]
    check((call.function.name, json.loads(call.function.arguments)) == ("met", {"snail": "hill"}), f"{call}")
    parts = [part.choices[0] for part in client.chat.completions.create(tools=[met], stream=True, **chat)]
    check("".join(part.delta.content or "" for part in parts) == (answer.message.content or ""), f"{parts}")
    new = [call for part in parts for call in part.delta.tool_calls or []]
    check("".join(call.function.arguments for call in new) == call.function.arguments, f"{parts}")
    check(new[0].function.name == "met" and parts[-1].finish_reason == "tool_calls", f"{parts}")
    result = {"role": "tool", "tool_call_id": call.id, "content": "It was red."}
    more = {**chat, "messages": [*MESSAGES, answer.message.model_dump(), result]}
    after = client.chat.completions.create(tools=[met], **more)
    check(after.usage.prompt_tokens > 0, f"{after}")
    without = client.chat.completions.create(tools=[met], tool_choice="none", **chat)
    check(not without.choices[0].message.tool_calls, f"{without}")
    must_call(client, chat, met)

    def flat(tool):
        return {"type": "function", **tool["function"]}

    asked = {"model": model, "input": MESSAGES, "temperature": 0, "max_output_tokens": 60, "tools": [flat(met)]}
    output = client.responses.create(**asked).output
    made = output[-1]
    check((made.type, made.name, made.arguments) == ("function_call", "met", call.function.arguments), f"{output}")
    with client.responses.stream(**asked) as stream:
        last = stream.get_final_response().output[-1]
    check((last.name, last.arguments) == (made.name, made.arguments), f"{last}")
    result = {"type": "function_call_output", "call_id": made.call_id, "output": "It was red."}
    after_it = client.responses.create(**{**asked, "input": [*MESSAGES, *output, result]})
    check(after_it.usage.input_tokens == after.usage.prompt_tokens, f"{after_it.usage}, {after.usage}")


def must_call(client, chat, met):
    """Whatever the model would write, the answer is a call, or beside a schema one or the other."""
    number = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"]}
    count = {"type": "function", "function": {"name": "count", "parameters": number}}
    named = {"type": "function", "function": {"name": "count"}}
    for seed in range(8):
        asked = {**chat, "tools": [count, met], "temperature": 1.0, "seed": seed, "max_tokens": 200}
        for choice in ("required", named):
            answer = client.chat.completions.create(tool_choice=choice, **asked).choices[0]
            calls = answer.message.tool_calls or []
            check(answer.finish_reason == "length" or calls and not answer.message.content, f"{answer}")
            check(choice == "required" or [call.function.name for call in calls] == ["count"], f"{answer}")
            parts = client.chat.completions.create(tool_choice=choice, stream=True, **asked)
            parts = [call for part in parts for call in part.choices[0].delta.tool_calls or []]
            words = lambda calls: [(call.function.name, call.function.arguments) for call in calls]
            check(words(parts) == words(calls), f"{parts}, {calls}")
            numbers = [json.loads(call.function.arguments)["n"] for call in calls if call.function.name == "count"]
            check(all(1 <= number <= 9 for number in numbers), f"{calls}")
        only = {"type": "json_schema", "json_schema": {"name": "n", "schema": number}}
        either = client.chat.completions.create(response_format=only, **asked).choices[0]
        check(either.finish_reason in ("tool_calls", "length") or json.loads(either.message.content)["n"], f"{either}")
    for wrong in ("sometimes", {"type": "function", "function": {"name": "nobody"}}):
        arguments = {**chat, "tools": [met], "tool_choice": wrong}
        error = refused(openai.BadRequestError, client.chat.completions.create, **arguments)
        check(error.param == "tool_choice", f"{error.body}")


def responses(client, model):
    """A response has the text of a chat, whole and in parts, and of a schema."""
    class Snail(pydantic.BaseModel):
        kind: Literal["red", "blue"]

    system = {"role": "developer", "content": "Be brief."}
    chat = {"model": model, "temperature": 0}
    of_chat = client.chat.completions.create(messages=[system, *MESSAGES], max_tokens=24, **chat)
    asked = {**chat, "instructions": "Be brief.", "input": MESSAGES[0]["content"], "max_output_tokens": 24}
    answer = client.responses.create(**asked)
    check(answer.output_text == of_chat.choices[0].message.content, f"{answer}, {of_chat}")
    check(answer.usage.output_tokens == of_chat.usage.completion_tokens, f"{answer.usage}")
    is_cut = of_chat.choices[0].finish_reason == "length"
    check(answer.status == ("incomplete" if is_cut else "completed"), f"{answer}")
    parts = list(client.responses.create(stream=True, **asked))
    deltas = [part.delta for part in parts if part.type == "response.output_text.delta"]
    check(parts[0].type == "response.created" and "".join(deltas) == answer.output_text, f"{parts}")
    check(parts[-1].type == f"response.{answer.status}" and parts[-1].response.usage == answer.usage, f"{parts[-1]}")
    with client.responses.stream(**asked) as stream:
        check(stream.get_final_response().output_text == answer.output_text, "responses.stream")
    parsed = client.responses.parse(text_format=Snail, **{**asked, "max_output_tokens": 60})
    check(parsed.output_parsed.kind in ("red", "blue"), f"{parsed}")
    more = [*MESSAGES, *answer.output, {"role": "user", "content": [{"type": "input_text", "text": "And then?"}]}]
    check(client.responses.create(**{**asked, "input": more}).usage.input_tokens > answer.usage.input_tokens, "turns")
    for wrong in ({"previous_response_id": answer.id}, {"tools": [{"type": "web_search"}]}, {"input": []}):
        error = refused(openai.BadRequestError, client.responses.create, **{**asked, **wrong})
        check(error.param == [*wrong][0], f"{error.body}")


def together(client, models):
    """Texts of many requests at once are those of each alone."""
    ask = lambda job: client.completions.create(model=job[0], prompt=job[1], temperature=0, max_tokens=40).choices[0].text
    jobs = [(model, PROMPT + " " + word) for word in ("a", "the cat", "in", "there was a") for model in models]
    alone = [ask(job) for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        check(list(pool.map(ask, jobs)) == alone, "texts that were written together differ from those written alone")


def sees(client, model, url):
    """The text about an image, whole, in parts and as a response."""
    chat = {"model": model, "temperature": 0, "max_tokens": 8}
    content = [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}}, {"type": "text", "text": ABOUT_IMAGE}]
    messages = [{"role": "user", "content": content}]
    text = client.chat.completions.create(messages=messages, **chat).choices[0].message.content
    streamed = client.chat.completions.create(messages=messages, stream=True, **chat)
    check("".join(part.choices[0].delta.content or "" for part in streamed) == text, "a stream about an image has another text")
    content = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": ABOUT_IMAGE}]
    answer = client.responses.create(model=model, temperature=0, max_output_tokens=8, input=[{"role": "user", "content": content}])
    check(answer.output_text == text, f"{answer}, {text}")
    messages[0]["content"][0] = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    error = refused(openai.BadRequestError, client.chat.completions.create, messages=messages, **chat)
    check(error.param == "messages" and "no address" in error.body["message"], f"{error.body}")
    return text


def speed(client, model, num_requests, num_tokens=128):
    def ask(index):
        text = {"prompt": f"{PROMPT} {index}", "temperature": 1.0, "seed": index, "max_tokens": num_tokens}
        return client.completions.create(model=model, **text).usage.completion_tokens

    started = time.perf_counter()
    with ThreadPoolExecutor(num_requests) as pool:
        tokens = sum(pool.map(ask, range(num_requests)))
    return tokens / (time.perf_counter() - started)


def page(address, image=None):
    from chromium import Chromium

    def wait(browser, expression, what):
        for _ in range(300):
            if browser.evaluate(expression):
                return
            time.sleep(0.1)
        raise SystemExit(f"error: the page: {what}; {browser.problems()}")

    with Chromium() as browser:
        browser.open(address)
        sections = "document.querySelectorAll('section').length"
        if image:
            wait(browser, f"{sections} == 1 && !$('picker').hidden", "there is no picker of images")
            browser.evaluate(f"images.push({json.dumps(image)}); showImages(); $('tokens').value = 8")
            wait(browser, "document.querySelector('#shown img').naturalWidth > 0", "the image is not shown")
        else:
            wait(browser, f"{sections} == 2", "there are no two models side by side")
        text = ABOUT_IMAGE if image else MESSAGES[0]["content"]
        browser.evaluate(f"$('message').value = {json.dumps(text)}; $('form').requestSubmit()")
        wait(browser, "panes.every(pane => pane.speed.textContent)", "no answer")
        answers = browser.evaluate("panes.map(pane => pane.messages.at(-1).content)")
        check(all(answers), f"empty answers: {answers}")
        if image:
            check(browser.evaluate("document.querySelectorAll('.user img').length == 1 && !images.length"), "the image beside the text")
        browser.evaluate("$('compare').click(); $('reset').click()")
        check(browser.evaluate(f"panes.length == {2 if image else 1} && !document.querySelector('.talk div')"), "reset")
        check(not browser.problems(), f"{browser.problems()}")
    return answers


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address")
    parser.add_argument("--chromium", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--tools", action="store_true")
    parser.add_argument("--image", type=pathlib.Path)
    args = parser.parse_args()
    client = openai.OpenAI(base_url=f"{args.address}/v1", api_key="none", max_retries=0)
    models = [model.id for model in client.models.list()]
    result, url = {"models": models}, None
    if args.image:
        url = "data:image/png;base64," + base64.b64encode(args.image.read_bytes()).decode()
        result["text"] = sees(client, models[0], url)
    elif args.tools:
        calls_tools(client, models[0])
    elif args.speed:
        speed(client, models[0], 1, 16)
        result["tokens_per_second"] = {number: round(speed(client, models[0], number), 1) for number in (1, 8, 1, 8)}
    else:
        interface(client, models)
        held_to_json(client, models[0])
        responses(client, models[0])
        together(client, models)
        ask = lambda model: client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, max_tokens=40)
        result["texts"] = {model: ask(model).choices[0].message.content for model in models}
    if args.chromium:
        result["page"] = page(args.address, url)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
