from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, TypedDict, Union

import numpy

__version__: str

class SelkieError(Exception):
    """A model, a device or a request failed; the text says what to do. Impossible arguments are ValueErrors."""

class Message(TypedDict):
    role: str
    content: str

Prompt = Union[str, Sequence[Message], Sequence[int]]
Device = Literal["auto", "cuda", "wgpu", "cpu"]
WhenFull = Literal["error", "drop-oldest"]
Speculate = Literal["auto", "off", "ngram", "mtp"]

@dataclass(frozen=True)
class Completion:
    """A finished answer. `str()` of it is its text."""

    text: str | None
    """None for a model without a tokenizer."""
    ids: list[int]
    """The generated ids, an end-of-sequence id included."""
    finish: Literal["stop", "length", "cancelled"]
    prompt_tokens: int
    reused: int
    """Prompt tokens that were not computed, since a prefix was in the cache."""
    reason: Literal["off", "prompt_logprobs", "host", "disk", "evicted", "policy", "no_state", "full", "first_sight"] | None
    """Why reuse ended."""
    dropped: int
    """Messages left out with when_full="drop-oldest"."""

def load(
    model: str | PathLike[str] | None = None,
    *,
    device: Device = "auto",
    adapter: str | None = None,
    memory: int | None = None,
    slots: int | None = None,
    kv_pages: int | None = None,
    max_batch: int | None = None,
    step_tokens: int | None = None,
    context: int | None = None,
    prefix_cache: bool = True,
    speculate: Speculate = "auto",
    drafts: int | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> Model:
    """Loads a model: a folder, a GGUF file, or a name in the cache of Hugging Face's tools; None is the demo model.

    memory: bytes for states and pages. speculate: guess tokens ahead, at most `drafts` (7) at a time; answers stay the same.
    progress: called with bytes loaded and bytes in all.
    """

def logits(ids: Sequence[int], model: str | PathLike[str] | None = None, *, device: Device = "auto") -> numpy.ndarray:
    """Logits of every token of a prompt, [T, V] float32. It loads the model for that: a tool for comparisons. Needs numpy."""

class Model:
    """A loaded model. It may be used from any thread; requests from all of them run as one batch."""

    @property
    def facts(self) -> dict[str, Any]:
        """Name, family, backend, device, context, and what the memory holds."""
    def stats(self) -> dict[str, int]:
        """Counters and what is in use, as of the last step."""
    def tokenize(self, text: str) -> list[int]: ...
    def detokenize(self, ids: Sequence[int]) -> str: ...
    def stream(
        self,
        prompt: Prompt,
        *,
        system: str | None = None,
        raw: bool = False,
        stop: str | Sequence[str] | None = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        namespace: str = "",
        when_full: WhenFull = "error",
    ) -> Stream:
        """Begins an answer, to be read piece by piece.

        A text is put as a user's message, unless it is raw or the model has no chat template: then it is continued. Sampling values
        that are not given are the model's own. Prefixes are shared within a namespace only.
        """
    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """Waits for a whole answer. Takes what `stream` takes."""
    async def generate_async(self, prompt: Prompt, **options: Any) -> Completion:
        """As `generate`, for asyncio."""
    def batch(self, prompts: Iterable[Prompt | Mapping[str, Any]], **options: Any) -> Batch:
        """Begins many answers, which come as (index, Completion) in the order in which they are complete.

        prompts: each as in `stream`, or a dict with its own options and the key "prompt".
        """
    def save_state(
        self, path: str | PathLike[str], prompt: Prompt, *, system: str | None = None, raw: bool = False
    ) -> int:
        """Writes the state after a prompt, given as in `stream`, to a file that `load_state` and `selkie bundle` read.

        It is computed unless the cache has it. Returns the tokens that a reader need not compute.
        """
    def load_state(self, path: str | PathLike[str]) -> int:
        """Puts a saved state of this model into the prefix cache: the tokens that prompts which begin with it need not compute."""
    def chat(self, *, system: str | None = None, **options: Any) -> Chat:
        """A conversation, whose options every turn may override."""

class Stream:
    """The pieces of an answer, for `for` and for `async for`. It may be read once. Closing it, or losing it, cancels the answer."""

    @property
    def completion(self) -> Completion | None:
        """The finished answer; None before the last piece was read."""
    @property
    def prompt_tokens(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
    def __next__(self) -> str: ...
    def __aiter__(self) -> AsyncIterator[str]: ...
    async def __anext__(self) -> str: ...
    def read(self) -> Completion: ...
    async def read_async(self) -> Completion: ...
    def close(self) -> None:
        """Cancels the answer; what there is of it can still be read."""
    def __enter__(self) -> Stream: ...
    def __exit__(self, *exc: object) -> None: ...
    async def __aenter__(self) -> Stream: ...
    async def __aexit__(self, *exc: object) -> None: ...

class Batch:
    """Many answers: iterates over (index, Completion) in the order of completion. Losing it cancels those that are not complete."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[tuple[int, Completion]]: ...
    def __aiter__(self) -> AsyncIterator[tuple[int, Completion]]: ...

class Chat:
    """A conversation. An answer joins it when it is read to its end, or closed and then read."""

    messages: list[Message]
    def ask(self, text: str, **options: Any) -> Stream:
        """Begins the next turn."""
