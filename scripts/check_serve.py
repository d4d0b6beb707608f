"""Holds `lora-train serve` against OpenAI's own client and, with --chromium, its page against a browser.

    scripts/check_serve.py http://127.0.0.1:8000 [--chromium] [--speed]

Prints one JSON object: the greedy texts of every model, and with --speed the tokens a second of one and of eight requests.
"""

import argparse
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor

import openai

PROMPT = "Once upon a time"
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
    check(bytes(byte for token in tokens for byte in token.bytes).decode().strip() == answer.message.content.strip(),
          "the bytes of the tokens are not the text")
    check(all(len(token.top_logprobs) == 2 for token in tokens), "top_logprobs")

    error = refused(openai.NotFoundError, client.completions.create, **{**completion, "model": "nobody"})
    check(error.code == "model_not_found" and first in error.body["message"], f"{error.body}")
    error = refused(openai.BadRequestError, client.completions.create, n=2, **completion)
    check(error.param == "n" and error.type == "invalid_request_error", f"{error.body}")
    error = refused(openai.BadRequestError, client.completions.create, **{**completion, "prompt": "word " * 20_000})
    check(error.code == "context_length_exceeded", f"{error.body}")


def together(client, models):
    """Texts of many requests at once are those of each alone."""
    ask = lambda job: client.completions.create(model=job[0], prompt=job[1], temperature=0, max_tokens=40).choices[0].text
    jobs = [(model, PROMPT + " " + word) for word in ("a", "the cat", "in", "there was a") for model in models]
    alone = [ask(job) for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        check(list(pool.map(ask, jobs)) == alone, "texts that were written together differ from those written alone")


def speed(client, model, num_requests, num_tokens=128):
    def ask(index):
        text = {"prompt": f"{PROMPT} {index}", "temperature": 1.0, "seed": index, "max_tokens": num_tokens}
        return client.completions.create(model=model, **text).usage.completion_tokens

    started = time.perf_counter()
    with ThreadPoolExecutor(num_requests) as pool:
        tokens = sum(pool.map(ask, range(num_requests)))
    return tokens / (time.perf_counter() - started)


def page(address):
    from chromium import Chromium

    def wait(browser, expression, what):
        for _ in range(300):
            if browser.evaluate(expression):
                return
            time.sleep(0.1)
        raise SystemExit(f"error: the page: {what}; {browser.problems()}")

    with Chromium() as browser:
        browser.open(address)
        wait(browser, "document.querySelectorAll('section').length == 2", "there are no two models side by side")
        browser.evaluate(f"$('message').value = {json.dumps(MESSAGES[0]['content'])}; $('form').requestSubmit()")
        wait(browser, "panes.every(pane => pane.speed.textContent)", "no answer")
        answers = browser.evaluate("panes.map(pane => pane.messages.at(-1).content)")
        check(all(answers), f"empty answers: {answers}")
        browser.evaluate("$('compare').click(); $('reset').click()")
        check(browser.evaluate("panes.length == 1 && !document.querySelector('.talk div')"), "reset")
        check(not browser.problems(), f"{browser.problems()}")
    return answers


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address")
    parser.add_argument("--chromium", action="store_true")
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=f"{args.address}/v1", api_key="none", max_retries=0)
    models = [model.id for model in client.models.list()]
    result = {"models": models}
    if args.speed:
        speed(client, models[0], 1, 16)
        result["tokens_per_second"] = {number: round(speed(client, models[0], number), 1) for number in (1, 8, 1, 8)}
    else:
        interface(client, models)
        together(client, models)
        ask = lambda model: client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, max_tokens=40)
        result["texts"] = {model: ask(model).choices[0].message.content for model in models}
    if args.chromium:
        result["page"] = page(args.address)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
