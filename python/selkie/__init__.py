"""selkie: inference for hybrid language models, attention beside recurrent layers, with a prefix cache.

    import selkie

    model = selkie.load("ibm-granite/granite-4.0-h-350m")     # a folder, a GGUF file or a name in the cache; nothing: the demo
    print(model.generate("What is 17 + 25?").text)
    for piece in model.stream("Tell me a story."):
        print(piece, end="", flush=True)

Streams are asynchronous iterators too. A request that is no longer read is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Optional

from . import _selkie
from ._selkie import SelkieError, __version__

__all__ = ["Batch", "Chat", "Completion", "Model", "SelkieError", "Stream", "load", "logits"]


@dataclass(frozen=True)
class Completion:
    """A finished answer."""

    text: Optional[str]
    ids: list[int]
    finish: str
    prompt_tokens: int
    reused: int
    reason: Optional[str]
    dropped: int

    def __str__(self):
        return self.text or ""


def load(
    model=None,
    *,
    device="auto",
    adapter=None,
    memory=None,
    slots=None,
    kv_pages=None,
    max_batch=None,
    step_tokens=None,
    context=None,
    prefix_cache=True,
    speculate="auto",
    drafts=None,
    progress=None,
):
    """Loads a model: a folder, a GGUF file, or a name in the cache of Hugging Face's tools; None is the demo model."""
    return Model(
        _selkie.load(
            model,
            device=device,
            adapter=adapter,
            memory=memory,
            slots=slots,
            kv_pages=kv_pages,
            max_batch=max_batch,
            step_tokens=step_tokens,
            context=context,
            prefix_cache=prefix_cache,
            speculate=speculate,
            drafts=drafts,
            progress=progress,
        )
    )


def logits(ids, model=None, *, device="auto"):
    """Logits of every token of a prompt, [T, V] float32 in numpy. It loads the model for that: a tool for comparisons."""
    import numpy

    data, columns = _selkie.logits(model, device, list(ids))
    return numpy.frombuffer(data, dtype=numpy.float32).reshape(len(ids), columns)


class Model:
    """A loaded model. It may be used from any thread; requests from all of them run as one batch."""

    def __init__(self, inner):
        self._inner = inner

    def __repr__(self):
        facts = self.facts
        return f"<selkie.Model {facts['name']} ({facts['family']}) on {facts['backend']}>"

    @property
    def facts(self):
        """Name, family, backend, device, context, and what the memory holds."""
        return self._inner.facts()

    def stats(self):
        """Counters and what is in use, as of the last step."""
        return self._inner.stats()

    def tokenize(self, text):
        return self._inner.tokenize(text)

    def detokenize(self, ids):
        return self._inner.detokenize(ids)

    def stream(self, prompt, *, system=None, raw=False, stop=(), **options):
        """Begins an answer, to be read piece by piece.

        prompt: a text, a list of messages ({"role", "content"}), or a list of token ids. A text is put as a user's message,
        unless it is raw or the model has no chat template: then it is continued.
        """
        stop = [stop] if isinstance(stop, str) else list(stop or ())
        return Stream(self._inner.submit(**_prompt(self._inner, prompt, system, raw), stop=stop, **options))

    def generate(self, prompt, **options):
        """Waits for a whole answer. Takes what `stream` takes."""
        return self.stream(prompt, **options).read()

    async def generate_async(self, prompt, **options):
        """As `generate`, for asyncio."""
        return await self.stream(prompt, **options).read_async()

    def batch(self, prompts, **options):
        """Begins many answers, which come as (index, Completion) in the order in which they are complete.

        prompts: each as in `stream`, or a dict with its own options and the key "prompt".
        """
        asks = [p if isinstance(p, dict) else {"prompt": p} for p in prompts]
        return Batch([self.stream(**{**options, **ask}) for ask in asks])

    def save_state(self, path, prompt, *, system=None, raw=False):
        """Writes the state after a prompt, given as in `stream`, to a file that `load_state` and `selkie bundle` read. It is computed
        unless the cache has it. Returns the tokens that a reader need not compute; the file is a conversation, and only its owner can read it."""
        tokens, _states, _bytes = self._inner.save_state(path, **_prompt(self._inner, prompt, system, raw))
        return tokens

    def load_state(self, path):
        """Puts a saved state of this model into the prefix cache. Returns the tokens that prompts which begin with it need not compute."""
        return self._inner.load_state(path)

    def chat(self, *, system=None, **options):
        """A conversation, whose options every turn may override."""
        return Chat(self, system, options)


def _prompt(inner, prompt, system, raw):
    if isinstance(prompt, str):
        if raw or (system is None and not inner.has_chat):
            return {"text": prompt}
        prompt = [{"role": "user", "content": prompt}]
    prompt = list(prompt)
    if prompt and isinstance(prompt[0], int):
        return {"ids": prompt}
    if system is not None:
        prompt.insert(0, {"role": "system", "content": system})
    for message in prompt:
        unknown = set(message) - {"role", "content"}
        if unknown or len(message) != 2:
            raise ValueError(f"a message has role and content, not {sorted(message)}")
    return {"messages": [(message["role"], message["content"]) for message in prompt]}


class Stream:
    """The pieces of an answer, for `for` and for `async for`. It may be read once. Closing it, or losing it, cancels the answer."""

    def __init__(self, answer):
        self._answer = answer
        self._completion = None
        self._at_end = None

    @property
    def completion(self):
        """The finished answer; None before the last piece was read."""
        return self._completion

    @property
    def prompt_tokens(self):
        return self._answer.prompt_tokens

    def _took(self, update):
        """The piece of an update, or None if it was the end."""
        if isinstance(update, dict):
            self._completion = Completion(**update)
            if self._at_end:
                self._at_end(self._completion)
        return update if isinstance(update, str) else None

    def __iter__(self):
        return self

    def __next__(self):
        while True:
            update = self._answer.wait()
            piece = self._took(update)
            if piece is None:
                raise StopIteration
            if piece:
                return piece

    def __aiter__(self):
        return self

    async def __anext__(self):
        while True:
            update = await self._next()
            piece = self._took(update)
            if piece is None:
                raise StopAsyncIteration
            if piece:
                return piece

    async def _next(self):
        loop = asyncio.get_running_loop()
        while True:
            woken = loop.create_future()
            update = self._answer.poll(lambda: loop.call_soon_threadsafe(_resolve, woken))
            if update is not False:
                return update
            await woken

    def read(self):
        """Reads to the end."""
        for _ in self:
            pass
        return self._completion

    async def read_async(self):
        """Reads to the end."""
        async for _ in self:
            pass
        return self._completion

    def close(self):
        """Cancels the answer; what there is of it can still be read."""
        self._answer.cancel()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.close()


def _resolve(future):
    if not future.done():
        future.set_result(None)


class Batch:
    """Many answers: iterates over (index, Completion) in the order of completion. Losing it cancels those that are not complete."""

    def __init__(self, streams):
        self._streams = dict(enumerate(streams))

    def __len__(self):
        return len(self._streams)

    def __iter__(self):
        woken = SimpleQueue()
        due = deque(self._streams)
        while self._streams:
            index = due.popleft() if due else _interruptible(woken)
            done = self._advance(index, lambda index=index: woken.put(index))
            if done is not None:
                yield index, done

    async def __aiter__(self):
        woken = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for index in list(self._streams):
            woken.put_nowait(index)
        while self._streams:
            index = await woken.get()
            done = self._advance(index, lambda index=index: loop.call_soon_threadsafe(woken.put_nowait, index))
            if done is not None:
                yield index, done

    def _advance(self, index, wake):
        """Reads what there is of an answer; its completion if that was all, else `wake` is called later."""
        stream = self._streams[index]
        while True:
            update = stream._answer.poll(wake)
            if update is False:
                return None
            if stream._took(update) is None:
                del self._streams[index]
                return stream.completion


def _interruptible(queue):
    """The next item; Ctrl-C ends the wait."""
    while True:
        try:
            return queue.get(timeout=0.1)
        except Empty:
            pass


class Chat:
    """A conversation. An answer joins it when it is read to its end, or closed and then read."""

    def __init__(self, model, system, options):
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self._model = model
        self._options = options

    def ask(self, text, **options):
        """Begins the next turn: a `Stream`."""
        turn = {"role": "user", "content": text}
        stream = self._model.stream([*self.messages, turn], **{**self._options, **options})
        stream._at_end = lambda done: self.messages.extend([turn, {"role": "assistant", "content": done.text}])
        return stream
