// Models from a URL: downloaded once into the browser's storage, then read from there. It runs in a worker.
//
// A model's record { url, id, done, files: { name: { size, version, done } } } describes its progress. Files that are not done
// are not used, but their download is resumed if the server still has the same version. Locks (by URL) coordinate tabs: one
// downloads while the others wait, and a model in use is not deleted.

import { SelkieError, size } from "./errors.js";
import { MemoryShelf, openShelf } from "./shelf.js";
import { forgetStates } from "./states.js";
import { blobFile, checkWhole, fileUrl, look, modelName, remoteFile, remoteModel, stream } from "./source.js";

// The headers of weights larger than this are checked before the download.
const LARGE_BYTES = 64 * 2 ** 20;
// After a crash what came since the last flush is downloaded again. A flush takes milliseconds.
const FLUSH_MS = 1000;
// How long the check for a newer version may take before the stored version is used.
const CHECK_MS = 2000;

// Takes a lock and returns the function that releases it; null if it is taken and `ifAvailable` is set.
function hold(url, mode, options = {}) {
  if (!navigator.locks) return Promise.resolve(() => {});
  return new Promise((resolve, reject) => {
    const held = (lock) => (lock ? new Promise((release) => resolve(release)) : resolve(null));
    navigator.locks.request(`selkie-model ${url}`, { mode, ...options }, held).catch(reject);
  });
}

async function opened(shelf, { url, id, files: names }, from, release) {
  const open = async (name) => (await shelf.open?.(url, name)) ?? blobFile(name, await shelf.blob(url, name));
  const files = await Promise.all(Object.keys(names).map(open));
  const close = () => {
    for (const file of files) file.close?.();
    release();
  };
  return { name: modelName(url), id: shelf.kind === "memory" ? null : id, files, from, problem: shelf.problem, release: close };
}

// The model at the directory `url`: { name, id, files, from, problem, release }; `id` names a stored download. Call `release` when the files have been read.
// `progress({ file, loaded, total })` is called during a download, `check(files)` may stop it before large weights are loaded.
export async function storedModel(url, { progress, check }) {
  const shelf = await openShelf();
  for (let from = "storage", current = false; ; ) {
    const release = await hold(url, "shared");
    const record = await shelf.record(url);
    if (record?.done && (current || !(await isOld(record)))) return opened(shelf, record, from, release);
    release();
    const finish = await hold(url, "exclusive");
    try {
      const now = await shelf.record(url);
      const byAnotherTab = now?.done && now.id !== record?.id;
      if (!byAnotherTab) {
        const used = await download(url, shelf, { progress, check });
        if (used.kind === "memory") return opened(used, await used.record(url), "memory", () => {});
        from = "network";
        current = true;
      }
    } catch (e) {
      // Use an older copy if it still exists.
      if (!["network", "not_found", "missing_file"].includes(e.code) || !(await shelf.record(url))?.done) throw e;
      current = true;
    } finally {
      finish();
    }
  }
}

// The same for reading headers only: nothing is downloaded, and `downloadBytes` is the size of the download.
export async function visibleModel(url) {
  const shelf = await openShelf();
  const release = await hold(url, "shared");
  const record = await shelf.record(url);
  if (record?.done) return { ...(await opened(shelf, record, "storage", release)), downloadBytes: 0 };
  release();
  const remote = await remoteModel(url);
  const downloadBytes = sum([...remote.small.values(), ...remote.weights]);
  return { name: modelName(url), files: remoteFiles(url, remote), downloadBytes, release() {} };
}

// Whether this page's own server has newer weights, or others instead. Other servers are not asked; the stored files are used.
async function isOld(record) {
  if (new URL(record.url).origin !== self.location.origin || !navigator.onLine) return false;
  const [name, file] = Object.entries(record.files).find(([name]) => /\.(safetensors|gguf)$/.test(name));
  try {
    const found = await look(fileUrl(record.url, name), AbortSignal.timeout(CHECK_MS));
    return !found || Boolean(found.version && file.version && found.version !== file.version);
  } catch {
    return false;
  }
}

// Not randomUUID: a page from a plain http address has none.
const randomId = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

const sum = (sized) => sized.reduce((total, { size }) => total + (size ?? 0), 0);

const remoteFiles = (url, { small, weights }) => [
  ...[...small].map(([name, blob]) => blobFile(name, blob)),
  ...weights.map((file) => remoteFile(url, file)),
];

// Downloads the model to `shelf`, or to memory if it does not fit there; returns the shelf that has it.
async function download(url, shelf, { progress, check }) {
  const loaded = new Map();
  let total = 0; // not known
  const count = (name, bytes) => {
    loaded.set(name, (loaded.get(name) ?? 0) + bytes);
    const sofar = [...loaded.values()].reduce((a, b) => a + b);
    progress({ file: name, loaded: sofar, total: sofar > total ? 0 : total });
  };
  const remote = await remoteModel(url, count);
  const bytes = sum([...remote.small.values(), ...remote.weights]);
  if (remote.weights.every(({ size }) => size !== null)) total = bytes;
  if (sum(remote.weights) > LARGE_BYTES) await check(remoteFiles(url, remote));

  const reset = (name) => loaded.delete(name);
  const problem = await lacksRoom(shelf, url, bytes);
  if (!problem) {
    try {
      await fill(shelf, url, remote, count, reset);
      return shelf;
    } catch (e) {
      if (e instanceof SelkieError) throw e;
      // Storage is full or denied: try once more without it.
      await shelf.remove(url).catch(() => {});
      shelf = { problem: `The model could not be kept in the browser (${e.message}).` };
      for (const { name } of remote.weights) reset(name);
    }
  }
  const memory = new MemoryShelf(problem ?? shelf.problem);
  await fill(memory, url, remote, count, reset);
  return memory;
}

async function lacksRoom(shelf, url, bytes) {
  if (shelf.kind === "memory") return shelf.problem;
  const record = await shelf.record(url);
  const need = bytes - sum(Object.values(record?.files ?? {}));
  const free = async () => {
    const { usage = 0, quota = Infinity } = (await navigator.storage?.estimate?.()) ?? {};
    return quota - usage;
  };
  if (need <= (await free())) return null;
  // States can be computed again.
  await forgetStates();
  const left = await free();
  if (need <= left) return null;
  return `The browser has room for ${size(Math.max(0, left))} more, the model needs ${size(need)}.`;
}

async function fill(shelf, url, { small, weights }, count, reset) {
  const before = await shelf.record(url);
  if (before?.done || !shelf.resumes) await shelf.remove(url);
  const known = before && !before.done && shelf.resumes ? before.files : {};
  const record = { url, id: randomId(), done: false, files: {} };
  for (const { name } of weights) if (known[name]?.version) record.files[name] = known[name];
  await shelf.save(record);

  for (const [name, blob] of small) {
    const writer = await shelf.writer(url, name, 0);
    await writer.write(new Uint8Array(await blob.arrayBuffer()));
    await writer.close();
    record.files[name] = { size: blob.size, version: null, done: true };
  }
  for (const file of weights) {
    const had = record.files[file.name];
    if (had?.done && had.version === file.version) count(file.name, had.size);
    else await fillFile(shelf, record, file.name, count, reset);
  }
  record.done = true;
  await shelf.save(record);
}

// One file of weights, from where an earlier download stopped.
async function fillFile(shelf, record, name, count, reset) {
  const { url } = record;
  const start = record.files[name] && !record.files[name].done ? record.files[name] : { size: 0, version: null };
  const writer = await shelf.writer(url, name, start.size);
  let at = writer.start;
  let savedAt = performance.now();
  const keep = async (version) => {
    if (!shelf.resumes) return;
    writer.flush();
    savedAt = performance.now();
    record.files[name] = { size: at, version, done: false };
    await shelf.save(record);
  };
  let seen = start.version;
  if (at > 0) count(name, at);
  try {
    const got = await stream(fileUrl(url, name), {
      from: at,
      expected: start.version,
      restart() {
        writer.restart();
        reset(name);
        at = 0;
      },
      async write(piece, version) {
        await writer.write(piece);
        at += piece.length;
        seen = version;
        count(name, piece.length);
        if (performance.now() - savedAt >= FLUSH_MS) await keep(version);
      },
    });
    if (!got) throw new SelkieError("missing_file", `${fileUrl(url, name)} is no longer there.`);
    await writer.close();
    record.files[name] = { size: got.size, version: null, done: false }; // the download of a damaged file is not resumed
    await shelf.save(record);
    await checkWhole(name, await shelf.blob(url, name));
    record.files[name] = { ...got, done: true };
    await shelf.save(record);
  } catch (e) {
    if (e.code === "network") await keep(seen).catch(() => {});
    writer.abandon();
    throw e;
  }
}

export async function storage() {
  const shelf = await openShelf();
  const { usage = null, quota = null } = (await navigator.storage?.estimate?.()) ?? {};
  const models = (await shelf.list()).map(({ url, done, files }) => ({ url, bytes: sum(Object.values(files)), done }));
  return { models, usage, quota, kind: shelf.kind, problem: shelf.problem };
}

export async function forget(url) {
  const shelf = await openShelf();
  const release = await hold(url, "exclusive", { ifAvailable: true });
  if (!release) throw new SelkieError("storage", "Another tab is just loading this model; it cannot be deleted now.");
  try {
    await shelf.remove(url);
  } finally {
    release();
  }
}
