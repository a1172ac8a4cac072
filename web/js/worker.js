// The worker: owns the engine, runs its steps, and handles the page's messages between steps.
//
// Page -> worker: { id, type, ... }. Worker -> page: { id, value } or { id, error } once for every message; also { progress }
// while loading, { updates: [...] } while generating, and { failed } when the engine can no longer be used.

import init, { WasmEngine, inspect } from "../selkie_web.js";
import { withPipelines } from "./device.js";
import { SelkieError, asSelkieError, packError } from "./errors.js";
import { pickedModel } from "./source.js";
import { forgetStates, openStates } from "./states.js";
import { forget, storage, storedModel, visibleModel } from "./store.js";

// Minimum time between messages about text and progress.
const FRAME_MS = 16;

let wasm = null; // promise of the module's exports
let engine = null;
let from = null; // where its model came from: { url } or { files }
let states = null; // the files of its disk tier
const requests = new Map(); // engine's id -> page's id
const inbox = [];
let busy = false;

self.onmessage = ({ data }) => {
  inbox.push(data);
  if (!busy) run();
  else if (data.type === "cancel") engine?.interrupt();
};

// Messages and steps alternate: while a step runs, the engine must not be used.
async function run() {
  busy = true;
  try {
    for (;;) {
      while (inbox.length > 0) await answer(inbox.shift());
      if (!engine) break;
      // The page may be closed at any time, and nobody is told of it.
      if (!engine.isIdle()) deliver(await engine.step());
      else if (!states || !(await engine.keep())) break;
      await nextTask();
    }
  } catch (e) {
    fail(e);
  } finally {
    busy = false;
  }
}

// Lets the browser deliver messages of the page. A timer would wait for milliseconds; a microtask would deliver none.
const channel = new MessageChannel();
let wake;
channel.port1.onmessage = () => wake();
const nextTask = () =>
  new Promise((resolve) => {
    wake = resolve;
    channel.port2.postMessage(null);
  });

async function answer({ id, type, ...message }) {
  try {
    if (!Object.hasOwn(actions, type)) throw new SelkieError("internal", `unknown message ${type}`);
    self.postMessage({ id, value: await actions[type]({ id, ...message }) });
  } catch (e) {
    if (isTrap(e)) fail(e);
    else self.postMessage({ id, error: packError(asSelkieError(e)) });
  }
}

// The module trapped (a panic, no memory) or ran out of stack, which browsers name differently. Its memory is then undefined.
const isTrap = (e) => e instanceof WebAssembly.RuntimeError || ["RangeError", "InternalError"].includes(e?.name);

const actions = {
  inspect: async ({ model, backend }) => {
    const source = await visible(model);
    try {
      await module();
      return { ...(await inspect(source.files, backend)), name: source.name, downloadBytes: source.downloadBytes ?? 0 };
    } finally {
      source.release?.();
    }
  },
  load,
  generate({ id, request }) {
    requests.set(loaded().submit(request), id);
  },
  computeState({ id, request }) {
    requests.set(loaded().computeState(request), id);
  },
  saveState,
  loadState,
  cancel({ request }) {
    for (const [own, page] of requests) if (request === undefined || request === page) loaded().cancel(own);
  },
  stats: async () => ({ ...loaded().stats(), wasmBytes: (await module()).memory.buffer.byteLength }),
  clearCache: () => loaded().clearCache(),
  setPrefixCache: ({ on }) => loaded().setPrefixCache(on),
  forgetStates: forgetAllStates,
  storage,
  forget: ({ url }) => forget(url),
};

const visible = ({ url, files }) => (url ? visibleModel(url) : pickedModel(files));

function loaded() {
  if (!engine) throw new SelkieError("bad_request", "No model is loaded.");
  return engine;
}

function module() {
  wasm ??= init({ module_or_path: new URL("../selkie_web_bg.wasm", import.meta.url) }).catch((e) => {
    wasm = null;
    throw new SelkieError("internal", `The engine's code could not be loaded: ${e.message}`, { cause: e });
  });
  return wasm;
}

async function load({ model, options: { diskCacheBytes, ...options } }) {
  module().catch(() => {}); // the module loads concurrently with the model
  const progress = throttled((progress) => self.postMessage({ progress }));
  const check = async (files) => {
    await module();
    const { fits, problem } = await inspect(files, options.backend);
    if (!fits) throw new SelkieError("too_large", problem);
  };
  const source = model.url
    ? await storedModel(model.url, { progress: (p) => progress({ stage: "download", ...p }), check })
    : { ...(await pickedModel(model.files)), from: "files", problem: null };
  let diskCacheProblem = null;
  try {
    await module();
    if (diskCacheBytes && options.prefixCache) {
      if (source.id) states = await openStates(source.id, diskCacheBytes).catch((e) => void (diskCacheProblem = e.message));
      else diskCacheProblem = "States are kept for models that the browser stores.";
    }
    const load = () => WasmEngine.load(source.files, { ...options, label: source.name }, progress, states ?? undefined);
    engine = await withPipelines(load, (loaded, total) => progress({ stage: "pipelines", loaded, total }));
    from = model;
  } finally {
    source.release?.();
  }
  const info = engine.info();
  if (!info.diskCache) closeStates();
  diskCacheProblem ??= info.diskCacheProblem;
  return { ...info, name: source.name, from: source.from, storageProblem: source.problem, diskCacheProblem };
}

function closeStates() {
  states?.close();
  states = null;
}

// Deletes what is kept of all models, and what the cache holds, which would be written again. With `stop` nothing more is kept.
async function forgetAllStates({ stop }) {
  const own = loaded();
  if (states) {
    own.clearCache();
    await states.removeOthers(0);
  }
  if (stop) {
    own.closeDisk();
    closeStates();
  }
  if (!states && !(await forgetStates())) {
    throw new SelkieError("storage", "Another tab keeps the states of its chats: close it, or delete them there.");
  }
}

// The engine with the digests of its model's files, which bundles need. The first call reads all weights again.
async function identified() {
  const own = loaded();
  if (own.isIdentified()) return own;
  const source = await visible(from);
  try {
    await own.identify(source.files);
  } finally {
    source.release?.();
  }
  return own;
}

// What the cache has of a prompt, as a blob: the browser takes the pieces out of this worker's memory.
async function saveState({ request }) {
  const parts = [];
  const saved = await (await identified()).saveState(request, { write: (bytes) => parts.push(new Blob([bytes])) });
  return { ...saved, blob: new Blob(parts, { type: "application/octet-stream" }) };
}

async function loadState({ file, name, options }) {
  const own = await identified();
  const reader = new FileReaderSync();
  let failed = null;
  const read = (offset, length) => {
    try {
      return new Uint8Array(reader.readAsArrayBuffer(file.slice(offset, offset + length)));
    } catch (e) {
      failed = new SelkieError("storage", `${name} can no longer be read; it was moved or changed. Choose it again.`, { cause: e });
      throw failed;
    }
  };
  try {
    return own.loadState({ name, size: file.size, read }, options);
  } catch (e) {
    throw failed ?? e;
  }
}

// At most one call per frame, but always the call that completes a stage.
function throttled(call) {
  let last = 0;
  return (progress) => {
    const now = performance.now();
    if (now - last < FRAME_MS && progress.loaded !== progress.total) return;
    last = now;
    call(progress);
  };
}

let texts = new Map(); // page's id -> text not yet sent
let sent = 0;

function deliver(updates) {
  const news = [];
  for (const { id, ...update } of updates) {
    const request = requests.get(id);
    if (update.type === "text") {
      texts.set(request, (texts.get(request) ?? "") + update.text);
      continue;
    }
    flush(news, request);
    requests.delete(id);
    news.push({ request, ...update });
  }
  const now = performance.now();
  if (now - sent >= FRAME_MS) for (const request of [...texts.keys()]) flush(news, request);
  if (news.length === 0) return;
  sent = now;
  self.postMessage({ updates: news });
}

function flush(news, request) {
  if (texts.has(request)) news.push({ request, type: "text", text: texts.get(request) });
  texts.delete(request);
}

// After an error in a step the state of the engine is undefined.
function fail(e) {
  engine = null;
  self.postMessage({ failed: packError(asSelkieError(e)) });
}
