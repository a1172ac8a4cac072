/** The model of the server that the page came from, as an engine: `selkie serve` answers instead of a worker. */

/** @typedef {import("./js/selkie.js").Engine} Engine */
/** @typedef {import("./js/selkie.js").GenerateRequest} GenerateRequest */
/** @typedef {import("./js/selkie.js").Update} Update */

/** How often a server that loads its model is asked again. */
const AGAIN_MS = 500;
/** Fields of OpenAI's protocol for options of ours. @type {Record<string, string>} */
const FIELDS = {
  maxTokens: "max_tokens", temperature: "temperature", topK: "top_k", topP: "top_p", minP: "min_p", seed: "seed",
  repetitionPenalty: "repetition_penalty", whenFull: "when_full", messages: "messages", prompt: "prompt",
};

/** Whether the server that the page came from has a model: it says so in the address. */
export const hasModel = new URLSearchParams(location.search).has("server");

/** Where the key for this server is kept until the tab is closed. */
const KEY = "selkie.key";
/** @param {string} key */
export const useKey = (key) => { sessionStorage[KEY] = key; };

class ServerError extends Error {
  /** @param {string} code @param {string} message */
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

/** @param {string} path @param {RequestInit & { headers?: Record<string, string> }} [options] @returns {Promise<Response>} */
async function ask(path, options = {}) {
  const key = sessionStorage[KEY], headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  const response = await fetch(new URL(path, document.baseURI), { ...options, headers }).catch((error) => {
    if (options.signal?.aborted) throw new ServerError("cancelled", "The request was cancelled.");
    throw new ServerError("network", `The server does not answer (${error.message}).`);
  });
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  throw refusal(response.status, error);
}

/** @param {number} status @param {{ code?: string, message?: string } | undefined} error */
function refusal(status, error) {
  const code = status === 401 ? "key" : error?.code === "loading" ? "loading" : status < 500 ? "bad_request" : "server";
  return new ServerError(code, error?.message ?? `The server answered with status ${status}.`);
}

/**
 * Waits until the server's model is loaded.
 * @param {AbortSignal} signal @returns {Promise<Engine>}
 */
export async function connect(signal) {
  const start = performance.now();
  for (;;) {
    try {
      const { name, info } = await (await ask("engine", { signal })).json();
      return engine({ ...info, name, from: "server", loadMs: performance.now() - start });
    } catch (error) {
      if (/** @type {ServerError} */ (error).code !== "loading") throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

/** @param {any} info @returns {Engine} */
function engine(info) {
  /** Without reuse, every request has a namespace of its own. */
  let reuse = true;
  const running = new Set();
  const generate = (/** @type {GenerateRequest} */ request) => {
    const stop = new AbortController();
    running.add(stop);
    const updates = answer(info, request, reuse, stop.signal);
    return {
      cancel: () => stop.abort(),
      async *[Symbol.asyncIterator]() {
        try {
          yield* updates;
        } finally {
          stop.abort();
          running.delete(stop);
        }
      },
    };
  };
  const cancel = () => running.forEach((stop) => stop.abort());
  return /** @type {any} */ ({
    info: Object.freeze(info),
    generate, cancel,
    close: cancel,
    async saveState(/** @type {import("./js/selkie.js").SaveStateRequest} */ { messages }) {
      const body = JSON.stringify({ model: info.name, messages });
      const response = await ask("v1/state/save", { method: "POST", headers: { "content-type": "application/json" }, body });
      return { blob: await response.blob() };
    },
    stats: async () => (await (await ask("engine")).json()).stats,
    setPrefixCache: async (/** @type {boolean} */ on) => { reuse = on; },
    // A server that stops is noticed by the next request.
    failed: new Promise(() => {}),
  });
}

/**
 * @param {any} info @param {GenerateRequest} request @param {boolean} reuse @param {AbortSignal} signal
 * @returns {AsyncGenerator<Update>}
 */
async function* answer(info, request, reuse, signal) {
  const body = { model: info.name, stream: true, stream_options: { include_usage: true }, ...(!reuse && { cache_salt: `${Date.now()} ${Math.random()}` }) };
  for (const [ours, theirs] of Object.entries(FIELDS)) {
    const value = /** @type {any} */ (request)[ours];
    if (value !== undefined) Object.assign(body, { [theirs]: value });
  }
  let text = "", finish = "cancelled", done;
  try {
    const path = "messages" in request ? "v1/chat/completions" : "v1/completions";
    const response = await ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });
    for await (const event of events(response)) {
      if (event.error) throw refusal(500, event.error);
      const choice = event.choices?.[0], more = choice?.delta?.content ?? choice?.text ?? "";
      finish = choice?.finish_reason ?? finish;
      if (event.usage) done = event;
      if (!more) continue;
      text += more;
      yield { type: "text", text: more };
    }
  } catch (error) {
    if (!signal.aborted) throw error;
  }
  yield /** @type {any} */ ({ type: "done", text, finish: done ? finish : "cancelled", ...report(done) });
}

/** What the page tells of an answer. @param {any} last the event with the usage */
function report(last) {
  const { usage, selkie } = last ?? {};
  if (!usage || !selkie) return { usage: {} };
  const { prompt_tokens: promptTokens, completion_tokens: completionTokens } = usage;
  const { matched_tokens: matched, reused_tokens: reused, reason, queue_ms: queue, prefill_ms: prefill, decode_ms: decode } = selkie;
  return {
    usage: { promptTokens, completionTokens, matched, reused, computed: promptTokens - reused, reason },
    leftOutMessages: selkie.dropped_messages,
    ttftMs: queue + prefill,
    ...(completionTokens > 1 && decode > 0 && { tokensPerSecond: ((completionTokens - 1) / decode) * 1e3 }),
  };
}

/** The data of server-sent events, as values. @param {Response} response @returns {AsyncGenerator<any>} */
async function* events(response) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ServerError("network", "The server ended the answer too early.");
    const parts = (rest + value).split("\n\n");
    rest = /** @type {string} */ (parts.pop());
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
