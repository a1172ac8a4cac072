#!/usr/bin/env python3
"""Two `selkie serve` with the demo model behind routers that exist.

- SGLang's router (cache_aware) in front of both: the same answers, and a conversation stays where its prefix is.
- The same router with a prefill and a decode worker: the answers of `selkie batch`, also when the decode worker has to compute a
  prompt itself. A prefill worker that is killed in the middle ends its requests, soon, and a new one at its place takes the next.
- Dynamo's indexer, fed by the KV events of one: what it says of a prompt is what the server then reuses. For a prompt that leaves a
  path between two states the indexer may say more, by that gap, and never less.
- The events themselves, decoded by msgspec, in both formats, and again from the replay socket.

usage: run.py [--selkie PROGRAM] [--seed N]      (pip install -r requirements.txt ai-dynamo-runtime==1.6.1)
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import msgspec
import zmq

BLOCK = 64
VOCABULARY = 1024


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def call(url, body=None, timeout=120):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def wait_until(what, ready, seconds=90):
    """Waits for `ready()` to be true; exceptions count as false."""
    deadline, why = time.monotonic() + seconds, "it was not so"
    while time.monotonic() < deadline:
        try:
            if ready():
                return
        except (OSError, urllib.error.URLError, ValueError, KeyError) as e:
            why = e
        time.sleep(0.05)
    raise SystemExit(f"{what}: not within {seconds} s ({why})")


@contextlib.contextmanager
def started(name, command):
    """A program in the background; what it wrote is shown if something fails."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            yield child
        except BaseException:
            log.seek(0)
            print(f"-- {name} --\n{log.read()[-3000:].decode(errors='replace')}", file=sys.stderr)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


@contextlib.contextmanager
def server(program, *options, port=None, child_to=None):
    """`selkie serve`: its URL. Its process is put into the list `child_to`."""
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    command = [program, "serve", "--backend", "cpu", "--port", str(port), "--served-model-name", "demo", *options]
    with started("selkie serve", command) as child:
        wait_until("selkie serve", lambda: child.poll() is not None or call(f"{url}/v1/models"))
        assert child.poll() is None, "selkie serve has ended"
        if child_to is not None:
            child_to.append(child)
        yield url


def complete(url, prompt, **options):
    """(text, prompt tokens, tokens that were not computed)"""
    answer = call(f"{url}/v1/completions", {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0, **options})
    usage = answer["usage"]
    return answer["choices"][0]["text"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def conversations(url, turns=3):
    """Answers, and tokens reused in later turns, of a few conversations with long beginnings."""
    texts, reused = [], 0
    for name in ("Iris", "Leo", "Mona", "Otto"):
        messages = [{"role": "system", "content": f"Your name is {name}. " * 25}]
        for turn in range(turns):
            messages.append({"role": "user", "content": f"What is {turn + 2} + {turn + 5}?"})
            answer = call(f"{url}/v1/chat/completions", {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 24})
            texts.append(answer["choices"][0]["message"]["content"])
            messages.append({"role": "assistant", "content": texts[-1]})
            if turn > 0:
                reused += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return texts, reused


def sglang(program):
    with server(program) as a, server(program) as b, server(program) as alone:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        router = ["-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
        metrics = ["--prometheus-port", str(free_port())]
        with started("router", [sys.executable, *router, *metrics, "--worker-urls", a, b]):
            wait_until("the router", lambda: complete(url, "Once")[1] > 0)
            texts, reused = conversations(url)
            expected, most = conversations(alone)
            assert texts == expected, f"behind the router: {texts}, alone: {expected}"
            # A turn that went to the other server would reuse nothing.
            assert most > 0 and reused == most, f"reused {reused} tokens behind the router, {most} alone"
    print(f"sglang-router: 12 turns, the same answers, {reused} tokens reused behind it and alone")


def metric(url, name):
    """The value of a line of `/metrics`, by its beginning."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if all(part in line for part in name))


def batch(program, requests):
    """The texts that `selkie batch` answers."""
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run([program, "batch", "-", "--backend", "cpu"], input=lines, capture_output=True, text=True, timeout=120, check=True)
    return [json.loads(line)["text"] for line in done.stdout.splitlines()]


def questions(count):
    """Chats with a long beginning of their own, and one that several share."""
    for i in range(count):
        name = ("Iris", "Leo", "Mona")[i % 3]
        system = f"Your name is {name}. " * (20 + i)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"What is {i + 2} + {i + 5}?"}]
        yield {"messages": messages, "temperature": 0, "max_tokens": 24}


def handover(program):
    """The router with a worker that computes prompts and one that answers."""
    over = ("selkie:handover_total", 'result="over"')
    room, address = free_port(), free_port()
    prefill_options = ["--role", "prefill", "--handover-port", str(room)]
    workers, asked = [], list(questions(12))
    expected = batch(program, asked)
    with contextlib.ExitStack() as stack:
        first = contextlib.ExitStack()
        stack.enter_context(first)
        prefill = first.enter_context(server(program, *prefill_options, port=address, child_to=workers))
        decode = stack.enter_context(server(program, "--role", "decode"))
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        router = ["-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
        pair = ["--pd-disaggregation", "--prefill", prefill, str(room), "--decode", decode]
        health = ["--health-check-interval-secs", "1", "--disable-retries", "--disable-circuit-breaker"]
        metrics = ["--prometheus-port", str(free_port())]
        stack.enter_context(started("router", [sys.executable, *router, *metrics, *pair, *health]))
        wait_until("the router", lambda: complete(url, "Once")[1] > 0)
        chat = lambda body: call(f"{url}/v1/chat/completions", {"model": "demo", **body})
        content = lambda answer: answer["choices"][0]["message"]["content"]
        for body, text in zip(asked[:8], expected):
            answer = chat(body)
            usage = answer["usage"]
            blocks = (usage["prompt_tokens"] - 1) // BLOCK * BLOCK
            assert content(answer) == text, f"through the router {content(answer)!r}, batch {text!r}"
            assert usage["prompt_tokens_details"]["cached_tokens"] == blocks, usage
        # Of some, earlier ones had brought all that can be used.
        sent, failed = metric(decode, over), metric(decode, ("selkie:handover_total", 'result="not"'))
        assert sent >= 4 and failed == 0, f"of 8 prompts {sent} were handed over, {failed} failed"

        # Killed while a request waits in it: an error or an answer of the decode worker, and no hang.
        pool = concurrent.futures.ThreadPoolExecutor(32)
        endless = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True}
        for _ in range(16):
            pool.submit(call, f"{prefill}/v1/completions", endless)
        wait_until("the prefill worker to be busy", lambda: call(f"{prefill}/load")["server_load"] == 16)
        ended = pool.submit(chat, asked[8])
        time.sleep(0.5)
        workers[0].kill()
        begin = time.monotonic()
        with contextlib.suppress(urllib.error.HTTPError):
            assert content(ended.result(60)) == expected[8]
        assert time.monotonic() - begin < 30, "a request waited for a worker that was killed"
        pool.shutdown()
        first.close()
        direct = call(f"{decode}/v1/chat/completions", {"model": "demo", **asked[9], "bootstrap_host": "127.0.0.1", "bootstrap_port": room, "bootstrap_room": 1})
        assert content(direct) == expected[9]

        # Another one at its place takes the next requests.
        stack.enter_context(server(program, *prefill_options, port=address))
        wait_until("the router to see it", lambda: content(chat(asked[10])) == expected[10])
        assert content(chat(asked[11])) == expected[11]
        wait_until("all requests to end", lambda: call(f"{decode}/load")["server_load"] == 0)
    print(f"hand-over: 11 chats as `selkie batch` answers them, {sent:.0f} prompts over, a killed worker")


def prompts(seed, count):
    """Random prompts as ids: new ones, longer ones and ones that leave an earlier one somewhere."""
    r, known = random.Random(seed), []
    tokens = lambda n: [r.randrange(4, VOCABULARY) for _ in range(n)]
    for _ in range(count):
        prompt = tokens(r.randrange(60, 500))
        if known and r.random() < 0.75:
            old = r.choice(known)
            keep = len(old) if r.random() < 0.5 else r.randrange(1, len(old))
            prompt = old[:keep] + tokens(r.randrange(1, 200))
        known.append(prompt)
        yield prompt


class Subscriber:
    """What the event socket says, decoded, in order and without gaps."""

    def __init__(self, address, topic=b""):
        self.topic = topic
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(address)
        self.socket.subscribe(b"")
        self.expected = None
        self.tree = {}
        self.payloads = []

    def drain(self, milliseconds=200):
        while self.socket.poll(milliseconds):
            topic, number, payload = self.socket.recv_multipart()
            (number,) = struct.unpack(">Q", number)
            assert topic == self.topic, topic
            assert self.expected in (None, number), f"batch {number} after {self.expected}"
            self.expected = number + 1
            self.payloads.append(payload)
            _, events, rank = msgspec.msgpack.decode(payload)
            assert rank == 0
            for event in events:
                self.take(event)

    def take(self, event):
        kind = event["type"]
        if kind == "BlockStored":
            hashes, ids, parent = event["block_hashes"], event["token_ids"], event["parent_block_hash"]
            assert len(ids) == BLOCK * len(hashes) and event["block_size"] == BLOCK
            assert parent is None or parent in self.tree, "a parent that was not announced"
            for i, name in enumerate(hashes):
                assert name not in self.tree, "announced twice"
                self.tree[name] = (parent, tuple(ids[BLOCK * i : BLOCK * (i + 1)]))
                parent = name
        elif kind == "BlockRemoved":
            for name in event["block_hashes"]:
                del self.tree[name]
        else:
            assert kind == "AllBlocksCleared", kind
            self.tree.clear()

    def matched(self, ids):
        """Tokens that the announced pages cover."""
        at, depth = None, 0
        children = {(parent, tokens): name for name, (parent, tokens) in self.tree.items()}
        while (at := children.get((at, tuple(ids[depth : depth + BLOCK])))) is not None:
            depth += BLOCK
        return depth


def events(program, seed):
    """Exactness of the events against the server's own reuse, while pages and states are evicted."""
    address, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    options = ["--kv-events", address, "--kv-events-replay", replay, "--kv-events-topic", "kv@pod@demo", "--slots", "24", "--kv-pages", "160"]
    exact = excess = 0
    with server(program, *options) as url:
        subscriber = Subscriber(address, b"kv@pod@demo")
        fresh = random.Random(seed + 2)
        new_prompt = lambda: [fresh.randrange(4, VOCABULARY) for _ in range(200)]
        wait_until("a subscription", lambda: complete(url, new_prompt()) and (subscriber.drain() or subscriber.expected is not None))
        # What was published before the subscription is taken from the replay.
        asker = zmq.Context.instance().socket(zmq.DEALER)
        asker.connect(replay)
        asker.send_multipart([b"", struct.pack(">Q", 0)])
        early = []
        while True:
            frames = asker.recv_multipart()
            number, payload = frames[-2], frames[-1]
            if number == b"\xff" * 8:
                break
            early.append((struct.unpack(">Q", number)[0], payload))
        assert [number for number, _ in early] == list(range(len(early))), "the replay has gaps"
        assert [payload for _, payload in early][-len(subscriber.payloads) :] == subscriber.payloads
        subscriber.tree.clear()
        for _, payload in early:
            for event in msgspec.msgpack.decode(payload)[1]:
                subscriber.take(event)
        for prompt in prompts(seed, 150):
            subscriber.drain()
            said = subscriber.matched(prompt[:-1])
            _, _, reused = complete(url, prompt)
            assert said >= reused, f"the events promise {said} tokens of {len(prompt)}, and {reused} were reused"
            exact += said == reused
            excess += said - reused
        assert len(subscriber.payloads) > 20 and any(b"BlockRemoved" in p for p in subscriber.payloads), "nothing was evicted"
    print(f"events: 150 prompts, {exact} as announced, {excess} tokens announced between states and not reused")
    # The other format, one prompt.
    with server(program, "--kv-events", address, "--kv-events-format", "positional") as url:
        plain = zmq.Context.instance().socket(zmq.SUB)
        plain.connect(address)
        plain.subscribe(b"")
        wait_until("an event", lambda: complete(url, [random.randrange(4, VOCABULARY) for _ in range(130)]) and plain.poll(200))
        _, batch, _ = msgspec.msgpack.decode(plain.recv_multipart()[2])
        tag, hashes, parent, ids, size, *rest = batch[0]
        assert (tag, parent, size, len(ids), len(hashes), rest) == ("BlockStored", None, 64, 128, 2, [None, "GPU", None, None, 0, "full_attention"])


def dynamo(program, seed):
    """Dynamo's indexer, which knows the prompts by the events alone."""
    address, port = f"tcp://127.0.0.1:{free_port()}", free_port()
    index = f"http://127.0.0.1:{port}"
    command = ["-m", "dynamo.indexer", "--block-size", str(BLOCK), "--port", str(port), "--model-name", "demo", "--workers", f"1={address}"]
    beyond = between = excess = 0
    with server(program, "--kv-events", address, "--slots", "24", "--kv-pages", "160") as url, started("indexer", [sys.executable, *command]):
        wait_until("the indexer", lambda: call(f"{index}/workers") is not None)
        subscriber = Subscriber(address)
        # So that it misses no event.
        time.sleep(1)

        def said(ids):
            answer = call(f"{index}/query", {"model_name": "demo", "token_ids": ids})
            return max([0, *(one["longest_matched"] for one in answer["instances"].values())])

        def heard():
            probe = [random.randrange(4, VOCABULARY) for _ in range(200)]
            complete(url, probe)
            time.sleep(0.1)
            return said(probe) > 0

        wait_until("the first events", heard)
        for prompt in prompts(seed + 1, 120):
            # It may be a moment late; then it says what was announced.
            wait_until("the indexer to follow", lambda: subscriber.drain(50) or said(prompt[:-1]) == subscriber.matched(prompt[:-1]), 20)
            promised = said(prompt[:-1])
            _, _, reused = complete(url, prompt)
            assert promised >= reused, f"the indexer says {promised} of {len(prompt)} tokens, {reused} were reused"
            beyond += promised == reused
            between += promised > reused
            excess += promised - reused
    assert beyond > 0
    print(f"Dynamo's indexer: {beyond} prompts as it said, {between} left a path between two states, {excess} tokens beyond")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--selkie", default="target/release/selkie")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["sglang", "handover", "events", "dynamo"])
    args = parser.parse_args()
    parts = [("sglang", lambda: sglang(args.selkie)), ("handover", lambda: handover(args.selkie))]
    for name, run in [*parts, ("events", lambda: events(args.selkie, args.seed)), ("dynamo", lambda: dynamo(args.selkie, args.seed))]:
        if args.only in (None, name):
            start = time.monotonic()
            run()
            print(f"  {time.monotonic() - start:.1f} s")
