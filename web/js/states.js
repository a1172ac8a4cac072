// The disk tier of the prefix cache: states and pages of prompts in the origin's private file system. It runs in a worker.
//
// Each model has two files, which the engine fills (core/src/tier/cells.rs): NAME.page and NAME.state. Its name needs digests
// of the weights; digests.json has those of stored models. One worker of the origin has the folder at a time, by a lock, which
// the browser releases when the worker ends.

const FOLDER = "selkie-states";
const DIGESTS = "digests.json";
const TTL_MS = 7 * 24 * 3600 * 1000;
// A worker of this tab that was just ended may still have the lock.
const WAIT_MS = 1000;
// Models whose digests are kept.
const MODELS = 32;

// Takes the lock and returns the function that releases it; null if another worker has it.
function hold() {
  return new Promise((resolve, reject) => {
    const held = () => new Promise((release) => resolve(release));
    navigator.locks.request(FOLDER, { signal: AbortSignal.timeout(WAIT_MS) }, held).catch((e) => {
      if (["TimeoutError", "AbortError"].includes(e.name)) resolve(null);
      else reject(e);
    });
  });
}

const root = () => navigator.storage.getDirectory();
const remove = (folder, name) => folder.removeEntry(name, { recursive: true }).catch(() => {});

// Reads and writes at once; every other use of the file fails until it is closed.
async function access(folder, name) {
  const file = await (await folder.getFileHandle(name, { create: true })).createSyncAccessHandle();
  const whole = (count, bytes) => {
    // If storage is full, Chromium returns a negative number as an unsigned one.
    if (count !== bytes.length) throw new DOMException("the storage is full, or the file is shorter than it was", "QuotaExceededError");
  };
  return {
    size: () => file.getSize(),
    resize: (bytes) => file.truncate(bytes),
    read: (at, into) => whole(file.read(into, { at }), into),
    write: (at, bytes) => whole(file.write(bytes, { at }), bytes),
    close: () => file.close(),
  };
}

async function readDigests(folder) {
  try {
    return JSON.parse(await (await (await folder.getFileHandle(DIGESTS)).getFile()).text());
  } catch {
    return {}; // never written, or not completely
  }
}

// The folder, for at most `most` bytes and the model whose download has the number `id`. Throws a sentence that says why not.
export async function openStates(id, most) {
  if (!navigator.locks || !self.FileSystemFileHandle?.prototype.createSyncAccessHandle) {
    throw new Error("This browser gives pages no fast access to files.");
  }
  const release = await hold();
  if (!release) throw new Error("Another tab keeps the states of its chats; this one goes on without.");
  try {
    const folder = await (await root()).getDirectoryHandle(FOLDER, { create: true });
    return new States(folder, id, most, await readDigests(folder), release);
  } catch (e) {
    release();
    throw e;
  }
}

class States {
  ttl = TTL_MS;
  #open = new Map(); // name -> file
  #folder;
  #id;
  #most;
  #known;
  #release;

  constructor(folder, id, most, known, release) {
    [this.#folder, this.#id, this.#most, this.#known, this.#release] = [folder, id, most, known, release];
  }

  get digests() {
    return this.#known[this.#id] ?? null;
  }

  learn(digests) {
    const text = JSON.stringify(Object.fromEntries([...Object.entries(this.#known).slice(1 - MODELS), [this.#id, digests]]));
    const write = (file) => {
      file.resize(0);
      file.write(0, new TextEncoder().encode(text));
      file.close();
    };
    access(this.#folder, DIGESTS).then(write).catch(() => {}); // they are computed again
  }

  // The files of a model, and the bytes that they may have.
  async open(name) {
    for (const file of [`${name}.page`, `${name}.state`]) this.#open.set(file, await access(this.#folder, file));
    const others = await this.removeOthers(this.#most / 2);
    const { usage = 0, quota = Infinity } = (await navigator.storage.estimate?.()) ?? {};
    const [pages, states] = this.#open.values();
    const room = (quota - usage) / 4 + pages.size() + states.size();
    return { pages, states, bytes: Math.max(0, Math.min(this.#most - others, room)) };
  }

  // Deletes what is old of other models, and the oldest of it beyond `most` bytes; returns the bytes that are left of it.
  async removeOthers(most) {
    const others = [];
    for await (const [name, handle] of this.#folder.entries()) {
      if (this.#open.has(name) || name === DIGESTS) continue;
      const { size, lastModified } = await handle.getFile();
      others.push({ name, size, lastModified });
    }
    others.sort((a, b) => a.lastModified - b.lastModified);
    let left = others.reduce((total, { size }) => total + size, 0);
    for (const { name, size, lastModified } of others) {
      if (left <= most && Date.now() - lastModified <= TTL_MS) continue;
      await remove(this.#folder, name);
      left -= size;
    }
    return left;
  }

  close() {
    for (const file of this.#open.values()) file.close();
    this.#open.clear();
    this.#release();
  }
}

// Deletes all states of all models; false if a worker has them.
export async function forgetStates() {
  if (!navigator.locks || !navigator.storage?.getDirectory) return true; // there are none
  const release = await hold();
  if (!release) return false;
  await remove(await root(), FOLDER);
  release();
  return true;
}
