"""Pages in headless Chromium, driven over its debugging pipe with nothing but the standard library.

    with Chromium() as browser:
        browser.open(path, width=1100, dark=True)
        browser.screenshot("page.png")
"""

import base64
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Chromium:
    def __init__(self, program: str | None = None) -> None:
        program = program or next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            raise SystemExit("error: no Chromium found\n  hint: apt-get install chromium, or give its path")
        self.profile = tempfile.TemporaryDirectory()
        to_browser, self.commands = os.pipe()
        self.answers, from_browser = os.pipe()
        # The browser reads commands from file descriptor 3 and writes answers to 4.
        relay = 'exec 3<&%d 4>&%d; exec "$0" "$@"' % (to_browser, from_browser)
        self.process = subprocess.Popen(
            ["bash", "-c", relay, program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}", "about:blank"],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.buffer, self.number, self.session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.call("Log.enable")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_) -> None:
        self.session = None
        try:
            self.call("Browser.close")
        except (OSError, EOFError):
            pass
        self.process.wait(timeout=30)
        os.close(self.commands)
        os.close(self.answers)
        self.profile.cleanup()

    def read(self) -> dict:
        while b"\0" not in self.buffer:
            received = os.read(self.answers, 1 << 16)
            if not received:
                raise EOFError("Chromium has ended")
            self.buffer += received
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method: str, **params) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def open(self, path: os.PathLike | str, width: int = 1100, height: int = 800, scale: float = 1,
             dark: bool = False, script: bool = True) -> None:
        """Opens a file or an address and waits until it has loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                  mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.events.clear()
        url = path if str(path).startswith("http://") else pathlib.Path(path).resolve().as_uri()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.read())

    def evaluate(self, expression: str):
        """The value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def problems(self) -> list[str]:
        """Messages of console and log since the page was opened: errors, refused loads."""
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(event["params"]["exceptionDetails"]["text"])
            elif event.get("method") == "Log.entryAdded":
                found.append(event["params"]["entry"]["text"])
        return found

    def screenshot(self, path: os.PathLike | str, height: int | None = None) -> None:
        """The page from its top: up to `height`, or all of it."""
        width = self.evaluate("innerWidth")
        height = height or self.evaluate("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        pathlib.Path(path).write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path: os.PathLike | str) -> int:
        """Prints the page on A4; returns the number of sheets."""
        printed = base64.b64decode(self.call("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)["data"])
        pathlib.Path(path).write_bytes(printed)
        # Each page of the PDF is an object, which Chromium does not compress.
        return len(re.findall(rb"/Type\s*/Page\b", printed))

    def beyond(self, width: int) -> tuple[int, str]:
        """How far the page extends beyond the right edge of a window of this width, and which elements do. A phone's
        `innerWidth` grows with the overflow, so it is of no use here."""
        beyond = self.evaluate(f"Math.max(document.documentElement.scrollWidth, innerWidth) - {width}")
        reaching = f"""[...document.body.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > {width} + 1)
                      .map(e => e.tagName.toLowerCase() + (e.className && typeof e.className == 'string' ? '.' + e.className : ''))
                      .slice(0, 5).join(', ')"""
        return beyond, self.evaluate(reaching)
