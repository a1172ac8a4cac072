// OpenAI's shape on an engine: `engine.chat.completions.create({ messages, stream })`.

import { SelkieError } from "./errors.js";
import { checkOptions } from "./options.js";

// Names of a request that have one of ours; those without are described in `create`.
const OURS = {
  max_tokens: "maxTokens", max_completion_tokens: "maxTokens", temperature: "temperature", top_p: "topP", top_k: "topK", min_p: "minP",
  repetition_penalty: "repetitionPenalty", seed: "seed", namespace: "namespace",
};
const NAMES = ["messages", "model", "stream", "stream_options", "stop", "n", "user", ...Object.keys(OURS)];
const CALL = "chat.completions.create";

export const completions = (engine) => ({
  async create(body = {}, { signal } = {}) {
    checkOptions(CALL, body, NAMES);
    const { messages = [], model = engine.info.name, stream = false, stream_options: streamOptions, stop, n = 1 } = body;
    if (n !== 1 && n !== null) throw new SelkieError("bad_request", `n is ${n}: a call makes one answer; call ${CALL} again for another.`);
    const request = { messages: messages.map(plain) };
    for (const [theirs, ours] of Object.entries(OURS)) {
      if (body[theirs] !== undefined && body[theirs] !== null) request[ours] = body[theirs];
    }
    if (stop) request.stop = [stop].flat();
    const head = { id: `chatcmpl-${crypto.randomUUID?.() ?? Date.now()}`, created: Math.floor(Date.now() / 1000), model };
    if (stream) return new Stream(engine, request, { ...head, object: "chat.completion.chunk" }, streamOptions?.include_usage, signal);
    const done = await whole(start(engine, request, signal));
    const message = { role: "assistant", content: done.text };
    const choice = { index: 0, message, logprobs: null, finish_reason: finish(done) };
    return { ...head, object: "chat.completion", choices: [choice], usage: usage(done), selkie: done.usage };
  },
});

// Chunks of one answer; leaving the loop, `controller.abort()` and the caller's signal end it.
class Stream {
  controller = new AbortController();
  #chunks;

  constructor(engine, request, head, withUsage, signal) {
    signal?.addEventListener("abort", () => this.controller.abort(), { once: true });
    if (signal?.aborted) this.controller.abort();
    this.#chunks = chunks(start(engine, request, this.controller.signal), head, withUsage);
  }

  [Symbol.asyncIterator]() {
    return this.#chunks;
  }
}

async function* chunks(generation, head, withUsage) {
  const chunk = (delta, finish_reason = null) => ({ ...head, choices: [{ index: 0, delta, logprobs: null, finish_reason }] });
  yield chunk({ role: "assistant", content: "" });
  for await (const update of generation) {
    if (update.type === "text") yield chunk({ content: update.text });
    else yield chunk({}, finish(uncancelled(update)));
  }
  if (withUsage) {
    const done = await generation.done;
    yield { ...head, choices: [], usage: usage(done), selkie: done.usage };
  }
}

function start(engine, request, signal) {
  if (signal?.aborted) throw cancelled();
  const generation = engine.generate(request);
  signal?.addEventListener("abort", () => generation.cancel(), { once: true });
  return generation;
}

const whole = async (generation) => uncancelled(await generation.done);
const cancelled = () => new SelkieError("cancelled", "The request was cancelled.");

function uncancelled(done) {
  if (done.finish === "cancelled") throw cancelled();
  return done;
}

const finish = (done) => (done.finish === "length" ? "length" : "stop");

const usage = ({ usage: { promptTokens, completionTokens, reused } }) => ({
  prompt_tokens: promptTokens,
  completion_tokens: completionTokens,
  total_tokens: promptTokens + completionTokens,
  prompt_tokens_details: { cached_tokens: reused },
});

// A message's content may be a list of parts; only text is served.
function plain({ role, content }, place) {
  if (!Array.isArray(content)) return { role, content: content ?? "" };
  const other = content.find(({ type }) => type !== "text");
  if (other) throw new SelkieError("bad_request", `messages[${place}] has a part of type "${other.type}"; only "text" is served.`);
  return { role, content: content.map(({ text }) => text).join("") };
}
