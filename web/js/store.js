// Models of a URL: downloaded once into the browser's storage, then read from there. It runs in a worker.
//
// A model's record { url, id, done, files: { name: { size, version, done } } } tells how far it is. What it does not call done
// is not used, but an unfinished file is gone on with if the server still has the same version. Locks (by URL) keep tabs
// apart: one downloads, the others wait; nobody deletes what is being read.

import { SelkieError, size } from "./errors.js";
import { MemoryShelf, openShelf } from "./shelf.js";
import { blobFile, checkWhole, fileUrl, look, modelName, remoteFile, remoteModel, stream } from "./source.js";

// Weights above this are looked at before they are downloaded.
const LARGE_BYTES = 64 * 2 ** 20;
// How much of a file may have to be downloaded again after a crash.
const FLUSH_BYTES = 16 * 2 ** 20;
const FLUSH_MS = 1000;
// How long the check for a newer version may take; then what is stored is used.
const CHECK_MS = 2000;

// A lock that is held until the returned function is called; null if it is not free and `ifAvailable`.
function hold(url, mode, options = {}) {
  if (!navigator.locks) return Promise.resolve(() => {});
  return new Promise((resolve, reject) => {
    const held = (lock) => (lock ? new Promise((release) => resolve(release)) : resolve(null));
    navigator.locks.request(`selkie-model ${url}`, { mode, ...options }, held).catch(reject);
  });
}

const opened = async (shelf, record, from, release) => ({
  name: modelName(record.url),
  files: await Promise.all(Object.keys(record.files).map(async (name) => blobFile(name, await shelf.blob(record.url, name)))),
  from,
  problem: shelf.problem,
  release,
});

// The model at the directory `url`: { name, files, from, problem, release }. Call `release` when the files have been read.
// `progress({ file, loaded, total })` hears of a download, `check(files)` may stop it before large weights come in.
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
      // An older copy is better than none, unless it is gone already.
      if (e.code !== "network" || !(await shelf.record(url))?.done) throw e;
      current = true;
    } finally {
      finish();
    }
  }
}

// The same for a look at the headers: nothing is downloaded, `downloadBytes` tells how much would be.
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

// Whether this page's own server has other weights by now. Other servers are not asked: what is stored is used as it is.
async function isOld(record) {
  if (new URL(record.url).origin !== self.location.origin || !navigator.onLine) return false;
  const [name, file] = Object.entries(record.files).find(([name]) => name.endsWith(".safetensors"));
  try {
    const found = await look(fileUrl(record.url, name), AbortSignal.timeout(CHECK_MS));
    return Boolean(found?.version && file.version && found.version !== file.version);
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

// Downloads the model onto `shelf`, or into memory if it does not fit there; returns the shelf that has it.
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
      // Full after all, or denied. It is tried once more without.
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
  const { usage = 0, quota = Infinity } = (await navigator.storage?.estimate?.()) ?? {};
  const record = await shelf.record(url);
  const need = bytes - sum(Object.values(record?.files ?? {}));
  if (usage + need <= quota) return null;
  return `The browser has room for ${size(Math.max(0, quota - usage))} more, the model needs ${size(need)}.`;
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
  let saved = at;
  let savedAt = performance.now();
  const keep = async (version) => {
    if (!shelf.resumes) return;
    writer.flush();
    saved = at;
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
        at = saved = 0;
      },
      async write(piece, version) {
        await writer.write(piece);
        at += piece.length;
        seen = version;
        count(name, piece.length);
        if (at - saved >= FLUSH_BYTES || performance.now() - savedAt >= FLUSH_MS) await keep(version);
      },
    });
    if (!got) throw new SelkieError("missing_file", `${fileUrl(url, name)} is no longer there.`);
    await writer.close();
    record.files[name] = { size: got.size, version: null, done: false }; // a damaged file is not gone on with
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
