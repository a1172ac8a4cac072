"""Compares servers with OpenAI's API by the chats that they answer, by hand: compare.py NAME=URL NAME=URL [--clients 1 4 8].

Every client has one chat: a system prompt of about 1,000 tokens that all share, and six turns of about 50 tokens, each answered
with exactly 64 tokens, streamed. All servers must be up; they are asked one after the other, in turns, and only one at a time.
Reported are the median of the rounds' tokens per second, and the median time to the first token over all turns of all rounds.
"""

import argparse
import functools
import http.client
import json
import random
import statistics
import threading
import time
import urllib.request
from urllib.parse import urlsplit

TURNS, ANSWER, SYSTEM_WORDS, TURN_WORDS = 6, 64, 750, 36
WORDS = "the river winds slowly past old stone houses where people read write sing and count lamps until morning comes again".split()


def words(seed, count):
    pick = random.Random(seed)
    return " ".join(pick.choice(WORDS) for _ in range(count))


@functools.cache
def model(server):
    with urllib.request.urlopen(f"{server}/v1/models") as answer:
        return json.load(answer)["data"][0]["id"]


def turn(server, messages):
    """Streams one answer; returns (text, seconds to the first token, usage)."""
    url = urlsplit(server)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=600)
    body = dict(model=model(server), messages=messages, max_tokens=ANSWER, temperature=0, ignore_eos=True, stream=True,
                stream_options=dict(include_usage=True))
    start, first, text, usage = time.perf_counter(), None, "", None
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{server}: {response.status} {response.read()[:300]}")
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            piece = choice["delta"].get("content")
            if piece:
                first = first or time.perf_counter() - start
                text += piece
    connection.close()
    return text, first or time.perf_counter() - start, usage


def chat(server, seed, client, out):
    # The same for all clients of all servers in a round: the first computes it, the others may reuse it.
    messages = [dict(role="system", content=words(seed, SYSTEM_WORDS))]
    for number in range(TURNS):
        messages.append(dict(role="user", content=words(f"{seed} {client} {number}", TURN_WORDS)))
        text, first, usage = turn(server, messages)
        messages.append(dict(role="assistant", content=text))
        out.append((first, usage["completion_tokens"], usage["prompt_tokens"]))


def measure(server, clients, seed):
    """(tokens per second, times to the first token, prompt tokens of the last turn)"""
    turns = [[] for _ in range(clients)]
    threads = [threading.Thread(target=chat, args=(server, seed, client, out)) for client, out in enumerate(turns)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    tokens = sum(count for out in turns for _, count, _ in out)
    if tokens != clients * TURNS * ANSWER:
        raise SystemExit(f"{server}: {tokens} tokens, not {clients * TURNS * ANSWER}")
    return tokens / seconds, [first for out in turns for first, _, _ in out], turns[0][-1][2]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    servers = [server.split("=", 1) for server in args.servers]
    for clients in args.clients:
        rates, firsts, length = ({name: [] for name, _ in servers} for _ in range(3))
        for number in range(args.rounds):
            for name, url in servers:
                rate, first, prompt = measure(url, clients, 1000 * clients + number)
                rates[name].append(rate)
                firsts[name] += first
                length[name].append(prompt)
        for name, _ in servers:
            rate, first = statistics.median(rates[name]), 1e3 * statistics.median(firsts[name])
            print(f"{clients} clients  {name:12} {rate:8.1f} tokens/s  first token {first:8.1f} ms  last prompt {length[name][0]}", flush=True)


main()
