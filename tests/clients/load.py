"""Many clients at a server of fornax's, as scripts/test-load.sh starts it: what each gets must be what it asked for, and
when they are gone nothing of them may be left. Knows HTTP and the protocol, nothing of the inside; standard library alone.

usage: load.py URL PID SECONDS SEED
"""

import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from urllib.parse import urlsplit

CLIENTS = 64
# Seconds of the load before anything is measured, and again until this share of the blocks was in use at once and a round
# made the server no larger than this many kilobytes: caches fill, and memory that is kept is taken. A server that grows
# without end never comes there.
WARM, USED, GROWN_KB = 60, 0.97, 512
ROUNDS = 30
# Kilobytes of resident memory that may come and go between two looks at a server that does nothing.
LOOSE_KB = 4 * 1024
# Kilobytes a minute that nobody would find in ten of them.
SLOPE_KB = 100
# Nothing takes longer, unless it hangs.
PATIENCE = 300

WORDS = (
    "river stone light paper green north table music horse cloud bread glass sound metal sugar plant chair ocean field "
    "story image tower watch train honey winter garden silver market letter window summer naïve 東京 🙂 Ωmega"
).split()


class Wrong(Exception):
    """An answer that was not asked for."""


class Left(Exception):
    """The client itself went away."""


class Seen:
    """What all clients saw."""

    def __init__(self):
        self.lock = threading.Lock()
        self.counts = Counter()
        self.errors = []
        self.first, self.gaps = [], []
        self.tokens = 0

    def count(self, what, tokens=0, first=None, gaps=()):
        with self.lock:
            self.counts[what] += 1
            self.tokens += tokens
            if first is not None:
                self.first.append(first)
            self.gaps.extend(gaps)

    def wrong(self, error):
        with self.lock:
            self.errors.append(error[:1000])


class Connection:
    """One request on one connection, bytes as they are."""

    def __init__(self, host, port):
        self.socket = socket.create_connection((host, port), timeout=PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.socket.makefile("rb")

    def close(self):
        self.file.close()
        self.socket.close()

    def send(self, method, path, body=b"", cut=None):
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        data = head.encode() + b"\r\n" + body
        self.socket.sendall(data[:cut])

    def head(self):
        line = self.file.readline()
        parts = line.split(b" ")
        if len(parts) < 2 or not parts[1].isdigit():
            raise Wrong(f"no status line: {line!r}")
        headers = {}
        while line := self.file.readline().strip():
            name, _, value = line.decode("latin-1").partition(": ")
            headers[name.lower()] = value
        return int(parts[1]), headers

    def chunks(self):
        """The chunks of a chunked body; the last one must come."""
        while True:
            size = self.file.readline()
            if not size.endswith(b"\r\n"):
                raise Wrong(f"the body broke off: {size!r}")
            size = int(size, 16)
            data = self.file.read(size + 2)
            if len(data) != size + 2:
                raise Wrong("a chunk broke off")
            if size == 0:
                return
            yield data[:-2]

    def body(self, headers):
        if headers.get("transfer-encoding") == "chunked":
            return b"".join(self.chunks())
        size = int(headers.get("content-length", 0))
        data = self.file.read(size)
        if len(data) != size:
            raise Wrong(f"{len(data)} of {size} bytes came")
        return data


def expect(holds, said):
    if not holds:
        raise Wrong(said)


class Client(threading.Thread):
    def __init__(self, load, number):
        super().__init__(daemon=True)
        self.load, self.number = load, number
        self.draw = random.Random(load.seed * 1000 + number)

    def run(self):
        kinds = [self.stream, self.whole, self.leave, self.bad, self.other]
        crowd = self.load.crowd
        while (crowd or time.monotonic() < self.load.until) and not self.load.seen.errors:
            kind = self.crowd if crowd else self.draw.choices(kinds, [40, 20, 20, 15, 5])[0]
            crowd = False
            connection = None
            try:
                connection = Connection(self.load.host, self.load.port)
                kind(connection)
            except Left:
                self.load.seen.count("left")
            except Exception as e:
                self.load.seen.wrong(f"{kind.__name__}: {type(e).__name__}: {e}")
            finally:
                if connection:
                    connection.close()

    def text(self, longest):
        # Most are short; some begin alike, as conversations do.
        n = int(longest ** self.draw.random())
        words = [self.draw.choice(WORDS) for _ in range(n)]
        begin = "You are one of several clients. " * self.draw.choice([0, 0, 3, 12])
        return begin + " ".join(words)

    def chat(self):
        draw = self.draw
        body = {
            "model": "load",
            "messages": [{"role": "user", "content": self.text(600)}],
            "max_tokens": int(160 ** draw.random()),
            "temperature": draw.choice([0, 0.7, 1.0, 1.5]),
            "seed": draw.randrange(1 << 40),
        }
        extra = [
            {"n": 2},
            {"logprobs": True, "top_logprobs": draw.randrange(5)},
            {"stop": ["the end", "\n\n"]},
            {"top_p": 0.9, "min_p": 0.02, "top_k": 40},
            {"frequency_penalty": 0.5, "presence_penalty": -0.5},
            # Few go first: who comes last by his own wish would wait as long as there is a crowd.
            {"priority": draw.randrange(2)},
            {"logit_bias": {str(draw.randrange(300)): 3}},
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "regex", "regex": "(yes|no), [a-z ]{1,40}"}},
        ]
        if draw.random() < 0.4:
            body.update(draw.choice(extra))
        return body

    def stream(self, connection):
        body = self.chat() | {"stream": True, "stream_options": {"include_usage": True}}
        tokens, first, gaps = self.read_stream(connection, body)
        self.load.seen.count("streamed", tokens, first, gaps)

    def read_stream(self, connection, body, leave_after=None):
        began = last = time.monotonic()
        connection.send("POST", "/v1/chat/completions", json.dumps(body).encode())
        status, headers = connection.head()
        if status != 200:
            raise Wrong(f"{status}: {connection.body(headers)!r} for {body}")
        expect(headers["content-type"] == "text/event-stream", headers)
        first, gaps, ends, usage, done, rest = None, [], Counter(), None, False, b""
        for chunk in connection.chunks():
            *events, rest = (rest + chunk).split(b"\n\n")
            for event in events:
                if event.startswith(b": "):
                    continue
                expect(event.startswith(b"data: ") and not done, event)
                if event == b"data: [DONE]":
                    done = True
                    continue
                data = json.loads(event[6:])
                expect("error" not in data, data)
                usage = data["usage"] or usage
                for choice in data["choices"]:
                    expect(not ends[choice["index"]], "a choice went on after its end")
                    ends[choice["index"]] += choice["finish_reason"] is not None
                    if choice["delta"].get("content"):
                        now = time.monotonic()
                        if first is None:
                            first = now - began
                        elif "n" not in body:
                            gaps.append(now - last)
                        last = now
                        if leave_after is not None and len(gaps) >= leave_after:
                            raise Left
        expect(done and not rest, "the stream ended without [DONE]")
        n = body.get("n", 1)
        expect(sum(ends.values()) == n, f"{ends} ends of {n}")
        generated = usage["completion_tokens"]
        expect(generated <= n * body["max_tokens"], f"{generated} tokens for {body}")
        return generated, first, gaps

    def whole(self, connection):
        body = self.chat()
        connection.send("POST", "/v1/chat/completions", json.dumps(body).encode())
        status, headers = connection.head()
        answer = connection.body(headers)
        expect(status == 200, f"{status}: {answer!r} for {body}")
        answer = json.loads(answer)
        expect(len(answer["choices"]) == body.get("n", 1), answer)
        for choice in answer["choices"]:
            expect(choice["finish_reason"] in ("stop", "length", "tool_calls"), choice)
            if body.get("response_format") == {"type": "json_object"} and choice["finish_reason"] == "stop":
                expect(isinstance(json.loads(choice["message"]["content"]), dict), choice)
        self.load.seen.count("whole", answer["usage"]["completion_tokens"])

    def leave(self, connection):
        body = self.chat() | {"stream": self.draw.random() < 0.7}
        data = json.dumps(body).encode()
        when = self.draw.randrange(4)
        if when == 0:
            # In the middle of the request.
            connection.send("POST", "/v1/chat/completions", data, cut=self.draw.randrange(1, len(data)))
        elif when == 1 or not body["stream"]:
            connection.send("POST", "/v1/chat/completions", data)
            time.sleep(self.draw.random() ** 2 * 2)
        else:
            body["stream_options"] = {"include_usage": True}
            self.read_stream(connection, body, leave_after=self.draw.randrange(20))
        raise Left

    def bad(self, connection):
        good = self.chat()
        deep = b"[" * 5000
        path, data, wanted = self.draw.choice(
            [
                ("/v1/chat/completions", good | {"temperature": "hot"}, 400),
                ("/v1/chat/completions", good | {"no_such_field": 1}, 400),
                ("/v1/chat/completions", good | {"max_tokens": 0}, 400),
                ("/v1/chat/completions", good | {"n": 1000}, 400),
                ("/v1/chat/completions", good | {"model": "gpt"}, 404),
                ("/v1/chat/completions", good | {"messages": []}, 400),
                ("/v1/chat/completions", good | {"response_format": {"type": "regex", "regex": "("}}, 400),
                ("/v1/chat/completions", good | {"messages": [{"role": "user", "content": "word " * 4000}]}, 400),
                ("/v1/chat/completions", b'{"messages": ' + deep, 400),
                ("/v1/chat/completions", b"\xff\xfe\x00", 400),
                ("/v1/completions", {"prompt": [[1], "x"]}, 400),
                ("/v1/embeddings", {"input": ""}, None),
                ("/v1/embeddings", {"input": [1 << 31]}, 400),
                ("/nothing", good, 404),
                ("/health", good, 405),
            ]
        )
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        connection.send("POST", path, data)
        status, headers = connection.head()
        answer = connection.body(headers)
        expect(status == wanted or wanted is None and status < 500, f"{status} for {path} {data[:200]!r}: {answer!r}")
        if status != 200:
            expect(json.loads(answer)["error"]["message"], answer)
        self.load.seen.count("bad")

    def crowd(self, connection):
        """As much as a client may want: half of them the longest prompts, then the others as many answers as can be
        chosen at once. A server touches memory for one more row the first time that a step has so many."""
        long = self.number % 2
        body = {
            "model": "load",
            "messages": [{"role": "user", "content": " ".join(self.draw.choices(WORDS[:26], k=600 if long else 2))}],
            "max_tokens": 24 if long else 12,
            "n": 1 if long else 8,
            "temperature": 1,
            "seed": self.draw.randrange(1 << 40),
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 5,
            "frequency_penalty": 0.1,
            "logit_bias": {"300": 1},
            "response_format": {"type": "json_object"},
        }
        self.read_stream(connection, body)

    def other(self, connection):
        path, body = self.draw.choice(
            [
                ("/v1/completions", {"prompt": self.text(200), "max_tokens": 8, "echo": True, "logprobs": 2}),
                ("/v1/embeddings", {"input": [self.text(100), self.text(20)]}),
                ("/v1/messages", {"messages": [{"role": "user", "content": self.text(50)}], "max_tokens": 9}),
                ("/v1/responses", {"input": self.text(50), "max_output_tokens": 9}),
                ("/tokenize", {"content": self.text(600)}),
                ("/metrics", None),
                ("/health", None),
            ]
        )
        if body is None:
            connection.send("GET", path)
        else:
            connection.send("POST", path, json.dumps(body).encode())
        status, headers = connection.head()
        answer = connection.body(headers)
        expect(status == 200, f"{status} for {path} {body}: {answer!r}")
        self.load.seen.count("other")


class Load:
    def __init__(self, url, pid, seed):
        parts = urlsplit(url)
        self.host, self.port, self.pid, self.seed = parts.hostname, parts.port, pid, seed
        self.until = 0
        self.seen = Seen()

    def get(self, path):
        connection = Connection(self.host, self.port)
        try:
            connection.send("GET", path)
            status, headers = connection.head()
            return status, connection.body(headers).decode()
        finally:
            connection.close()

    def figure(self, name):
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith((name + " ", name + "{")):
                return float(line.rsplit(" ", 1)[1])
        raise Wrong(f"/metrics has no {name}")

    def resident_kb(self):
        with open(f"/proc/{self.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))

    def settled(self):
        """What is held when nothing is asked."""
        began = time.monotonic()
        while self.figure("fornax_running_requests") + self.figure("fornax_waiting_requests") > 0 or (
            # This look is one itself.
            self.figure("fornax_connections") > 1
        ):
            expect(time.monotonic() - began < PATIENCE, "the server does not come to rest")
            time.sleep(0.05)
        process, files = f"/proc/{self.pid}", []
        blocks = self.figure("fornax_kv_blocks_used")
        for _ in range(20):
            # The connection of the look itself goes in a while.
            time.sleep(0.1)
            files.append(len(os.listdir(f"{process}/fd")))
        return {
            "blocks": blocks,
            "files": min(files),
            "threads": len(os.listdir(f"{process}/task")),
            "rss_kb": self.resident_kb(),
        }

    def run(self, seconds):
        """The load for so long; the resident memory meanwhile, as (second, kilobytes)."""
        began = time.monotonic()
        self.until = began + seconds
        clients = [Client(self, self.draws + n) for n in range(CLIENTS)]
        self.draws += CLIENTS
        for client in clients:
            client.start()
        memory = []
        while any(c.is_alive() for c in clients):
            now = time.monotonic() - began
            if now < seconds:
                memory.append((now, self.resident_kb()))
                blocks = self.figure("fornax_kv_blocks_used") + self.figure("fornax_kv_blocks_cached")
                self.used = max(self.used, blocks / self.figure("fornax_kv_blocks_total"))
            expect(now < seconds + 2 * PATIENCE, "clients do not end")
            time.sleep(0.5)
        return memory

    # Whether clients begin with all that they may want.
    draws, used, crowd = 0, 0.0, True


def slope(points):
    """Kilobytes a second by least squares, and its standard error over means of tenths, which are nearly independent."""
    tenth = max(len(points) // 10, 1)
    means = [points[i : i + tenth] for i in range(0, len(points) - tenth + 1, tenth)]
    means = [tuple(sum(v) / len(part) for v in zip(*part)) for part in means]
    n = len(means)
    mid_x, mid_y = (sum(v) / n for v in zip(*means))
    spread = sum((x - mid_x) ** 2 for x, _ in means)
    rise = sum((x - mid_x) * (y - mid_y) for x, y in means) / spread
    rest = sum((y - mid_y - rise * (x - mid_x)) ** 2 for x, y in means)
    return rise, (rest / max(n - 2, 1) / spread) ** 0.5


def percentile(values, share):
    values = sorted(values)
    return values[min(int(len(values) * share), len(values) - 1)] if values else float("nan")


def main():
    url, pid, seconds, seed = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    load = Load(url, pid, seed)
    start = warm = load.settled()
    for rounds in range(1, ROUNDS + 1):
        load.run(min(WARM, seconds / 2))
        expect(not load.seen.errors, load.seen.errors[:5])
        load.crowd, before, warm = False, warm, load.settled()
        print(f"warm-up {rounds}: {warm['rss_kb']} KB at rest, {load.used:.0%} of the blocks in use at once", flush=True)
        if load.used >= USED and warm["rss_kb"] <= before["rss_kb"] + GROWN_KB:
            break
    else:
        raise Wrong(f"after {ROUNDS} rounds the server still grows, or has not used its blocks")
    load.seen = seen = Seen()
    memory = load.run(seconds)
    for error in seen.errors[:10]:
        print("not asked for:", error)
    end = load.settled()
    status, health = load.get("/health")
    rise, error = slope(memory)
    print(f"{seconds:.0f} s, {CLIENTS} clients, seed {seed}: {dict(sorted(seen.counts.items()))}, {seen.tokens} tokens")
    print(f"not asked for: {len(seen.errors)}")
    for name, values in [("first text", seen.first), ("gap between two texts", seen.gaps)]:
        shares = [percentile(values, share) for share in (0.5, 0.9, 0.99, 1)]
        print(f"{name}, s: p50 {shares[0]:.3f}, p90 {shares[1]:.3f}, p99 {shares[2]:.3f}, worst {shares[3]:.3f}")
    print(f"blocks in use at once: {load.used:.0%} of the pool")
    print(f"preemptions {load.figure('fornax_preemptions_total'):.0f}, steps {load.figure('fornax_steps_total'):.0f}")
    print(f"at rest: at the start {start}, after the warm-up {warm}, at the end {end}")
    print(f"resident memory under load: {rise * 60:+.0f} KB a minute, standard error {error * 60:.0f}")
    expect(not seen.errors, f"{len(seen.errors)} answers that were not asked for")
    for kind in ("streamed", "whole", "left", "bad", "other"):
        expect(seen.counts[kind] > 0, f"no client of the kind {kind}")
    expect(status == 200, health)
    expect(end["blocks"] == start["blocks"], f"blocks: {start['blocks']} at the start, {end['blocks']} at the end")
    expect(end["files"] <= start["files"], f"files: {start['files']} at the start, {end['files']} at the end")
    expect(end["threads"] <= warm["threads"], f"threads: {warm['threads']} before, {end['threads']} after")
    expect(end["rss_kb"] <= warm["rss_kb"] + LOOSE_KB, "memory did not come back to what it was after the warm-up")
    expect(rise * 60 <= max(180 * error, SLOPE_KB), "memory grows under load")
    print("nothing is left behind")


if __name__ == "__main__":
    try:
        main()
    except Wrong as e:
        sys.exit(f"failed: {e}")
