"""Headless Chromium by its debugging protocol, over a pair of pipes: no driver, no library."""
import base64
import json
import os
import select
import subprocess
import time


class Browser:
    """One page. Exceptions of its scripts and refused loads are kept in `errors`."""

    def __init__(self, folder, width=1200, height=1000):
        to_read, self.to_browser = os.pipe()
        self.from_browser, to_write = os.pipe()

        def descriptors():  # the protocol's are 3 and 4
            low, high = os.dup(to_read), os.dup(to_write)
            os.dup2(low, 3)
            os.dup2(high, 4)
        self.process = subprocess.Popen(
            ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
             f"--user-data-dir={folder}", f"--window-size={width},{height}", "--remote-debugging-pipe", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=descriptors, close_fds=False)
        os.close(to_read)
        os.close(to_write)
        self.number, self.buffer, self.errors = 0, b"", []
        target = self.call("Target.createTarget", {"url": "about:blank"}, session=None)["targetId"]
        self.session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True}, session=None)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(domain + ".enable")
        self.call("Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})

    def messages(self, timeout):
        end = time.monotonic() + timeout
        while True:
            *whole, self.buffer = self.buffer.split(b"\0")
            for message in whole:
                yield json.loads(message)
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.from_browser], [], [], left)[0]:
                return
            part = os.read(self.from_browser, 1 << 16)
            if not part:
                raise RuntimeError("the browser has ended")
            self.buffer += part

    def note(self, message):
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:500])
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.errors.append(message["params"]["entry"]["text"] + " " + message["params"]["entry"].get("url", ""))

    def call(self, method, parameters=None, session=""):
        self.number += 1
        number = self.number
        request = {"id": number, "method": method, "params": parameters or {}}
        if session is not None:
            request["sessionId"] = session or self.session
        os.write(self.to_browser, json.dumps(request).encode() + b"\0")
        waiting = []
        for message in self.messages(30):
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self.note(message)
            waiting.append(message)
        raise RuntimeError(f"no answer to {method}")

    def open(self, url):
        self.call("Page.navigate", {"url": url})

    def look(self, seconds):
        """Lets the page live."""
        for message in self.messages(seconds):
            self.note(message)

    def value(self, expression):
        result = self.call("Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def screenshot(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot", {"format": "png"})["data"]))

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.to_browser)
        os.close(self.from_browser)
