// Storage for models: the origin's private file system, else the Cache API, else memory.
//
// For each model (named by its URL) a shelf stores files and one record that lists the complete ones. It runs in a
// worker.

import { SelkieError } from "./errors.js";

const FOLDER = "selkie-models";

// The folder name for a URL.
async function key(url) {
  const hash = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(url));
  return [...new Uint8Array(hash, 0, 12)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

// Turns "not found" into null.
const optional = (promise) =>
  promise.catch((e) => {
    if (e.name === "NotFoundError") return null;
    throw e;
  });

class FileShelf {
  kind = "opfs";
  problem = null;
  resumes = true;

  static async open() {
    if (!self.FileSystemFileHandle?.prototype.createSyncAccessHandle) throw new Error("no access to files from workers");
    const root = await navigator.storage.getDirectory();
    const shelf = new FileShelf();
    shelf.root = await root.getDirectoryHandle(FOLDER, { create: true });
    return shelf;
  }

  async #folder(url, create = false) {
    return optional(this.root.getDirectoryHandle(await key(url), { create }));
  }

  async record(url) {
    const folder = await this.#folder(url);
    return folder && readRecord(folder);
  }

  async save(record) {
    const writer = await this.writer(record.url, "record.json", 0);
    await writer.write(new TextEncoder().encode(JSON.stringify(record)));
    await writer.close();
  }

  // Replaces the file's content from `at` on; `start` is called with that offset. One writer per file at a time, over all tabs.
  async writer(url, name, at) {
    const folder = await this.#folder(url, true);
    const file = await folder.getFileHandle(name, { create: true });
    let access;
    try {
      access = await file.createSyncAccessHandle();
    } catch (e) {
      if (e.name !== "NoModificationAllowedError") throw e;
      throw new SelkieError("storage", "Another tab is just loading this model. Wait for it, then try again.", { cause: e });
    }
    if (access.getSize() < at) at = 0; // shorter than recorded: start again
    access.truncate(at);
    return {
      start: at,
      write(bytes) {
        const written = access.write(bytes, { at });
        // If storage is full, Chromium returns a negative number as an unsigned one.
        if (written !== bytes.length) throw new DOMException("the storage is full", "QuotaExceededError");
        at += written;
      },
      restart() {
        at = 0;
        access.truncate(0);
      },
      flush: () => access.flush(),
      close() {
        access.flush();
        access.close();
      },
      abandon: () => access.close(),
    };
  }

  async blob(url, name) {
    const folder = await this.#folder(url);
    const file = folder && (await optional(folder.getFileHandle(name)));
    return file && file.getFile();
  }

  // The file for the engine, to be closed; null if it is open elsewhere. A blob's bytes come from another process, these do not.
  async open(url, name) {
    const folder = await this.#folder(url);
    const file = await folder.getFileHandle(name);
    const access = await file.createSyncAccessHandle({ mode: "read-only" }).catch(() => null);
    if (!access) return null;
    const read = async (offset, length) => {
      const bytes = new Uint8Array(length);
      return bytes.subarray(0, access.read(bytes, { at: offset }));
    };
    return { name, size: access.getSize(), read, close: () => access.close() };
  }

  // The record is removed first, so that an interrupted removal leaves nothing that looks complete.
  async remove(url) {
    const folder = await this.#folder(url);
    if (folder) await optional(folder.removeEntry("record.json"));
    await optional(this.root.removeEntry(await key(url), { recursive: true }));
  }

  async list() {
    const records = [];
    for await (const folder of this.root.values()) {
      if (folder.kind === "directory") records.push(await readRecord(folder));
    }
    return records.filter(Boolean);
  }
}

// A record that was not completely written counts as missing.
async function readRecord(folder) {
  const file = await optional(folder.getFileHandle("record.json"));
  try {
    return file && JSON.parse(await (await file.getFile()).text());
  } catch {
    return null;
  }
}

// A writer that stores the whole file when it is closed.
function collector(finish) {
  const parts = [];
  return {
    start: 0,
    write: (bytes) => void parts.push(bytes.slice()),
    restart: () => void (parts.length = 0),
    flush() {},
    close: () => finish(new Blob(parts)),
    abandon() {},
  };
}

class CacheShelf {
  kind = "cache";
  problem = null;
  resumes = false;

  static async open() {
    const shelf = new CacheShelf();
    shelf.cache = await caches.open(FOLDER);
    return shelf;
  }

  async #address(url, name) {
    return new URL(`/${FOLDER}/${await key(url)}/${name}`, self.location.origin).href;
  }

  async record(url) {
    const blob = await this.blob(url, "record.json");
    return blob && JSON.parse(await blob.text());
  }

  async save(record) {
    await this.cache.put(await this.#address(record.url, "record.json"), new Response(JSON.stringify(record)));
  }

  async writer(url, name) {
    const address = await this.#address(url, name);
    return collector((blob) => this.cache.put(address, new Response(blob)));
  }

  async blob(url, name) {
    const response = await this.cache.match(await this.#address(url, name));
    return response ? response.blob() : null;
  }

  async remove(url) {
    const folder = await this.#address(url, "");
    await this.cache.delete(`${folder}record.json`);
    for (const { url } of await this.cache.keys()) if (url.startsWith(folder)) await this.cache.delete(url);
  }

  async list() {
    const kept = (await this.cache.keys()).filter(({ url }) => url.endsWith("/record.json"));
    return Promise.all(kept.map(async (request) => (await this.cache.match(request)).json()));
  }
}

export class MemoryShelf {
  kind = "memory";
  resumes = false;
  #records = new Map();
  #blobs = new Map();

  // `problem`: a sentence that says why no persistent storage is available.
  constructor(problem) {
    this.problem = problem;
  }

  record = async (url) => this.#records.get(url) ?? null;
  save = async (record) => void this.#records.set(record.url, record);
  writer = async (url, name) => collector((blob) => void this.#blobs.set(`${url} ${name}`, blob));
  blob = async (url, name) => this.#blobs.get(`${url} ${name}`) ?? null;
  list = async () => [...this.#records.values()];

  async remove(url) {
    this.#records.delete(url);
    for (const name of this.#blobs.keys()) if (name.startsWith(`${url} `)) this.#blobs.delete(name);
  }
}

// The best shelf that this browser supports.
export async function openShelf() {
  if (!self.isSecureContext) return new MemoryShelf("A page from an http address may store nothing; use https or localhost.");
  for (const kind of [FileShelf, CacheShelf]) {
    try {
      return await kind.open();
    } catch {
      // Try the next kind.
    }
  }
  return new MemoryShelf("The browser does not let this page store anything (a private window, or blocked by its settings).");
}
