// The API of selkie for pages; types and documentation are in selkie.d.ts.

import { SelkieError, asSelkieError, unpackError } from "./errors.js";
import { completions } from "./openai.js";
import { GENERATE, INSPECT, LOAD, LOAD_STATE, SAVE_STATE, checkOptions } from "./options.js";
import { directoryUrl, modelUrl } from "./source.js";

export { SelkieError, modelUrl };

// A worker takes a request between two steps. If it does not within this time, a chat template does not terminate.
const TAKEN_MS = 60_000;

// Where this module came from, in a form that bundlers leave alone.
const here = import.meta.url;
let assets = null;

export function setAssets(url) {
  assets = new URL(url.endsWith("/") ? url : `${url}/`, document.baseURI).href;
}

function startWorker() {
  const url = assets ? new URL("js/worker.js", assets) : new URL(here.replace(/[^/]*$/, "worker.js"));
  const options = { type: "module", name: "selkie" };
  if (url.origin !== location.origin) return foreignWorker(url, options);
  if (assets) return new Worker(url, options);
  // Bundlers recognise exactly this form and bundle the worker.
  return new Worker(new URL("./worker.js", import.meta.url), { type: "module", name: "selkie" });
}

// A worker of another origin is refused. One of our own may import a module from there.
function foreignWorker(url, options) {
  const blob = URL.createObjectURL(new Blob([`import ${JSON.stringify(url.href)};`], { type: "text/javascript" }));
  const worker = new Worker(blob, options);
  // The worker has read it by the time of its first message.
  worker.addEventListener("message", () => URL.revokeObjectURL(blob), { once: true });
  return worker;
}

// A worker and the messages that it has not answered yet.
class Client {
  #worker = startWorker();
  #waiting = new Map();
  #next = 1;
  #ended = null;
  onprogress = () => {};
  onupdate = () => {};
  onend = () => {};

  constructor() {
    this.#worker.onmessage = ({ data }) => this.#receive(data);
    this.#worker.onerror = (e) => {
      e.preventDefault();
      this.end(new SelkieError("internal", `The worker failed: ${e.message ?? "it could not be started"}.`));
    };
  }

  // Returns the message's id and a promise of the answer.
  ask(type, message = {}) {
    const id = this.#next++;
    const answer = new Promise((resolve, reject) => {
      if (this.#ended) return reject(this.#ended);
      this.#waiting.set(id, { resolve, reject });
      this.#worker.postMessage({ id, type, ...message });
    });
    return { id, answer };
  }

  #receive({ id, value, error, progress, updates, failed }) {
    if (progress) this.onprogress(progress);
    for (const update of updates ?? []) this.onupdate(update);
    if (failed) this.end(unpackError(failed));
    const waiting = this.#waiting.get(id);
    this.#waiting.delete(id);
    if (error) waiting?.reject(unpackError(error));
    else waiting?.resolve(value);
  }

  // Ends the worker; unanswered messages are rejected with `error`.
  end(error) {
    if (this.#ended) return;
    this.#ended = error;
    this.#worker.terminate();
    for (const { reject } of this.#waiting.values()) reject(error);
    this.#waiting.clear();
    this.onend(error);
  }
}

const cancelled = (what) => new SelkieError("cancelled", `The ${what} was cancelled.`);

// Asks a new worker one question and ends it after the answer.
async function once(type, message, signal) {
  const client = new Client();
  const stop = () => client.end(cancelled(type));
  if (signal?.aborted) stop();
  signal?.addEventListener("abort", stop);
  try {
    return await client.ask(type, message).answer;
  } finally {
    signal?.removeEventListener("abort", stop);
    stop();
  }
}

function located(model) {
  if (typeof model?.url === "string") return { url: directoryUrl(model.url, document.baseURI) };
  // Messages do not preserve a file's path within the folder.
  if (model?.files) return { files: [...model.files].map((file) => ({ path: file.webkitRelativePath || file.name, file })) };
  throw new SelkieError("bad_request", "A model is { url } or { files }.");
}

export async function inspect(model, options = {}) {
  checkOptions("inspect", options, INSPECT);
  const { backend = "auto", signal } = options;
  return once("inspect", { model: located(model), backend }, signal);
}

export async function storage() {
  return once("storage");
}

export async function forget(url) {
  return once("forget", located({ url }));
}

export async function load(given = {}) {
  const start = performance.now();
  checkOptions("load", given, LOAD);
  const { model, memoryMiB, diskCacheMiB, onProgress, signal, backend = "auto", prefixCache = true } = given;
  const { contextTokens, maxBatch, speculate, drafts } = given;
  const options = { backend, prefixCache, contextTokens, maxBatch, speculate, drafts };
  if (diskCacheMiB) options.diskCacheBytes = diskCacheMiB * 2 ** 20;
  if (memoryMiB !== undefined) options.memoryBytes = memoryMiB * 2 ** 20;
  const source = located(model);
  const client = new Client();
  client.onprogress = (progress) => onProgress?.(progress);
  const stop = () => client.end(cancelled("load"));
  if (signal?.aborted) stop();
  signal?.addEventListener("abort", stop);
  try {
    const info = await client.ask("load", { model: source, options }).answer;
    // Without persistence a browser that is short of space may delete the model. It may refuse; nothing depends on it.
    if (source.url) navigator.storage?.persist?.().catch(() => {});
    return new Engine(client, { ...info, loadMs: performance.now() - start });
  } catch (e) {
    client.end(asSelkieError(e));
    throw e;
  } finally {
    signal?.removeEventListener("abort", stop);
  }
}

class Engine {
  #client;
  #running = new Map();

  constructor(client, info) {
    this.#client = client;
    this.info = Object.freeze(info);
    this.chat = Object.freeze({ completions: completions(this) });
    this.failed = new Promise((resolve) => {
      client.onend = (error) => {
        for (const generation of this.#running.values()) generation.fail(error);
        this.#running.clear();
        if (error.code !== "cancelled") resolve(error);
      };
    });
    client.onupdate = ({ request, ...update }) => {
      this.#running.get(request)?.push(update);
      if (update.type === "done") this.#running.delete(request);
    };
  }

  generate(request = {}) {
    try {
      checkOptions("generate", request, GENERATE);
    } catch (error) {
      const generation = new Generation(() => {});
      generation.fail(error);
      return generation;
    }
    return this.#start("generate", request);
  }

  // Queues a request of a kind.
  #start(type, request) {
    const { id, answer } = this.#client.ask(type, { request });
    const stuck = () => this.#client.end(new SelkieError("internal", "The engine did not finish preparing the request's prompt."));
    const timer = setTimeout(stuck, TAKEN_MS);
    answer.catch(() => {}).then(() => clearTimeout(timer));
    const generation = new Generation(() => this.#client.ask("cancel", { request: id }).answer.catch(() => {}));
    this.#running.set(id, generation);
    answer.catch((error) => {
      this.#running.delete(id);
      generation.fail(error);
    });
    return generation;
  }

  async saveState(request = {}) {
    checkOptions("saveState", request, SAVE_STATE);
    const { finish } = await this.#start("computeState", request).done;
    if (finish === "cancelled") throw cancelled("request");
    return this.#client.ask("saveState", { request }).answer;
  }

  async loadState(bundle, options = {}) {
    checkOptions("loadState", options, LOAD_STATE);
    const file = bundle instanceof Blob ? bundle : new Blob([bundle]);
    return this.#client.ask("loadState", { file, name: file.name ?? "the bundle", options }).answer;
  }

  cancel() {
    this.#client.ask("cancel").answer.catch(() => {});
  }

  stats() {
    return this.#client.ask("stats").answer;
  }

  clearCache() {
    return this.#client.ask("clearCache").answer;
  }

  forgetStates({ stop = false } = {}) {
    return this.#client.ask("forgetStates", { stop }).answer;
  }

  setPrefixCache(on) {
    return this.#client.ask("setPrefixCache", { on }).answer;
  }

  close() {
    this.#client.end(new SelkieError("cancelled", "The engine was closed."));
  }
}

class Generation {
  #stop;
  #queue = [];
  #ended = false;
  #error = null;
  #wake = () => {};
  #resolve;
  #reject;

  constructor(stop) {
    this.#stop = stop;
    this.done = new Promise((resolve, reject) => {
      this.#resolve = resolve;
      this.#reject = reject;
    });
    this.done.catch(() => {}); // the iteration reports it
  }

  cancel() {
    if (!this.#ended) this.#stop();
  }

  push(update) {
    if (update.error) return this.fail(unpackError(update.error));
    const last = this.#queue.at(-1);
    if (update.type === "text" && last?.type === "text") last.text += update.text;
    else this.#queue.push(update);
    if (update.type === "done") {
      this.#ended = true;
      this.#resolve(update);
    }
    this.#wake();
  }

  fail(error) {
    if (this.#ended) return;
    this.#ended = true;
    this.#error = error;
    this.#reject(error);
    this.#wake();
  }

  async *[Symbol.asyncIterator]() {
    try {
      for (;;) {
        while (this.#queue.length > 0) yield this.#queue.shift();
        if (this.#error) throw this.#error;
        if (this.#ended) return;
        await new Promise((resolve) => (this.#wake = resolve));
      }
    } finally {
      this.cancel();
    }
  }
}
