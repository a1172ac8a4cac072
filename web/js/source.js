// Finds and reads the files of a model: from a folder that the user picked, or from a URL.
//
// A file for the engine is { name, size, read(offset, length) -> Promise<Uint8Array> }. Files are named by plain names.

import { SelkieError, asSelkieError } from "./errors.js";

const CONFIG = "config.json";
const SINGLE = "model.safetensors";
const INDEX = "model.safetensors.index.json";
// The weights of a folder without the others; from a URL under this name only, since a server does not list its files.
const GGUF = "model.gguf";
// Stands for an unknown size: larger than any offset in the file.
const UNKNOWN_SIZE = Number.MAX_SAFE_INTEGER;

// ---- Blobs: picked and stored files

export function blobFile(name, blob) {
  const read = async (offset, length) => {
    try {
      return new Uint8Array(await blob.slice(offset, offset + length).arrayBuffer());
    } catch (e) {
      throw new SelkieError("storage", `${name} can no longer be read; it was moved or changed. Choose it again.`, { cause: e });
    }
  };
  return { name, size: blob.size, read };
}

// The model among picked files, [{ path, file }]: the files of the outermost folder with a config.json. Folders inside it hold
// exports for other programs.
export async function pickedModel(picked) {
  const folders = picked.map(({ path }) => path.split("/").slice(0, -1));
  const models = folders.filter((_, i) => picked[i].file.name === CONFIG).sort((a, b) => a.length - b.length);
  const folder = (models[0] ?? folders[0] ?? []).join("/");
  const files = new Map(picked.filter((_, i) => folders[i].join("/") === folder).map(({ file }) => [file.name, file]));
  const name = folder.split("/").at(-1) || "model";
  if (files.size === 0) throw new SelkieError("missing_file", "No files were chosen.");
  if (!files.has(CONFIG)) {
    throw new SelkieError("missing_file", `There is no ${CONFIG} among the chosen files; choose the folder that holds it.`);
  }
  if (!files.has(SINGLE)) {
    const index = files.get(INDEX);
    if (!index && ![...files.keys()].some((name) => name.endsWith(".gguf"))) {
      const other = [...files.keys()].find((name) => /\.(bin|pth?|onnx)$/.test(name));
      throw noWeights("a GGUF file in this folder", other && `${other} has to be converted to safetensors first`);
    }
    for (const shard of index ? shardNames(await index.text()) : []) {
      if (!files.has(shard)) throw new SelkieError("missing_file", `${INDEX} names ${shard}, but it is not in the folder.`);
    }
  }
  return { name, files: [...files].map(([name, file]) => blobFile(name, file)) };
}

function noWeights(where, hint) {
  return new SelkieError("missing_file", `There is neither ${SINGLE} nor ${INDEX} nor ${where}${hint ? `; ${hint}` : ""}.`);
}

// Weight files that an index names.
function shardNames(text) {
  const map = parse(INDEX, text)?.weight_map;
  const names = [...new Set(Object.values(map ?? {}))];
  if (names.length === 0) throw new SelkieError("bad_model", `${INDEX}: there is no weight_map in it.`);
  const bad = names.find((name) => typeof name !== "string" || !/^[^/\\:\p{Cc}]+\.safetensors$/u.test(name));
  if (bad !== undefined) throw new SelkieError("bad_model", `${INDEX}: ${JSON.stringify(bad)} is not a name of a weight file.`);
  return names;
}

function parse(name, text) {
  try {
    return JSON.parse(text);
  } catch (e) {
    throw new SelkieError("bad_model", `${name} is not JSON: ${e.message}.`, { cause: e });
  }
}

// Rejects a truncated file: a server may close the connection early without an error.
export async function checkWhole(name, blob) {
  if (name.endsWith(".json")) parse(name, await blob.text());
  const damaged = (why) => new SelkieError("bad_model", `${name} is damaged or incomplete: ${why}.`);
  if (name.endsWith(".gguf")) return checkGguf(blob, damaged);
  if (!name.endsWith(".safetensors")) return;
  if (blob.size < 8) throw damaged(`it has ${blob.size} bytes`);
  const length = Number(new DataView(await blob.slice(0, 8).arrayBuffer()).getBigUint64(0, true));
  if (8 + length > blob.size) throw damaged(`it ends within its header, after ${blob.size} bytes`);
  let header;
  try {
    header = JSON.parse(await blob.slice(8, 8 + length).text());
  } catch {
    throw damaged("its header is not JSON");
  }
  let end = 0;
  for (const tensor of Object.values(header ?? {})) end = Math.max(end, Number(tensor?.data_offsets?.[1] ?? 0));
  if (8 + length + end > blob.size) throw damaged(`it ends after ${blob.size} of ${8 + length + end} bytes`);
}

// Bytes of a value by its type (8: a text, 9: a list), and elements and bytes of a block of a tensor by its type.
const VALUES = [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8];
const BLOCKS = {
  0: [1, 4], 1: [1, 2], 2: [32, 18], 3: [32, 20], 6: [32, 22], 7: [32, 24], 8: [32, 34], 10: [256, 84], 11: [256, 110], 12: [256, 144],
  13: [256, 176], 14: [256, 210], 20: [32, 18], 23: [256, 136], 30: [1, 2], 39: [32, 17], 40: [64, 36],
};
// Larger headers are left to the engine.
const MOST_HEADER = 64 << 20;

// The same for a GGUF file: where its tensors end, as far as their types are known.
async function checkGguf(blob, damaged) {
  const head = new DataView(await blob.slice(0, MOST_HEADER).arrayBuffer());
  if (head.byteLength < 4 || head.getUint32(0, true) !== 0x46554747) throw damaged("it does not begin like a GGUF file");
  let end;
  try {
    end = endOfGguf(head);
  } catch (e) {
    if (!(e instanceof RangeError)) throw e;
    if (blob.size <= MOST_HEADER) throw damaged(`it ends within its header, after ${blob.size} bytes`);
    return;
  }
  if (end > blob.size) throw damaged(`it ends after ${blob.size} of ${end} bytes`);
}

function endOfGguf(head) {
  let at = 8, alignment = 32, end = 0;
  const u32 = () => head.getUint32((at += 4) - 4, true);
  const u64 = () => Number(head.getBigUint64((at += 8) - 8, true));
  const text = () => {
    const length = u64();
    return new TextDecoder().decode(new Uint8Array(head.buffer, (at += length) - length, length));
  };
  const skip = (type, count) => {
    if (type !== 8) return (at += VALUES[type] * count);
    for (let i = 0; i < count; i++) {
      const length = u64();
      at += length;
    }
  };
  const [tensors, keys] = [u64(), u64()];
  for (let i = 0; i < keys; i++) {
    const key = text(), type = u32();
    if (key === "general.alignment") alignment = head.getUint32(at, true);
    if (type === 9) skip(u32(), u64());
    else skip(type, 1);
  }
  for (let i = 0; i < tensors; i++) {
    text();
    let elements = 1;
    for (let dims = u32(); dims > 0; dims--) elements *= u64();
    const [block, bytes] = BLOCKS[u32()] ?? [1, 0];
    end = Math.max(end, u64() + elements / block * bytes);
  }
  return Math.ceil(at / alignment) * alignment + end;
}

// ---- URLs

// The URL of a model's directory, to which file names are appended. The address of one of its JSON or weight files, or of the
// model's page at Hugging Face, also means the directory.
export function directoryUrl(text, base) {
  let url;
  try {
    url = new URL(text, base);
  } catch {
    throw new SelkieError("not_found", "This is not an address. One looks like https://huggingface.co/name/model.");
  }
  // Checked here, because a worker from a static host may have no Content-Security-Policy.
  const local = url.origin === self.location.origin || (url.protocol === "http:" && url.hostname === "localhost");
  if (url.protocol !== "https:" && !local) throw notAllowed(url);
  url.hash = "";
  if (url.hostname === "huggingface.co" || url.hostname === "hf.co") url = hubUrl(url);
  url.pathname = url.pathname.replace(/\/(?:[^/]+\.(?:json|safetensors)|model\.gguf)$/, "/").replace(/\/?$/, "/");
  return url.href;
}

function hubUrl(url) {
  const [owner, model, kind, revision, ...below] = url.pathname.split("/").filter(Boolean);
  if (!model) {
    const message = "A model on Hugging Face has an owner and a name: https://huggingface.co/owner/model.";
    throw new SelkieError("not_found", message);
  }
  const ofFile = kind === "blob" || kind === "raw";
  const path = ofFile || kind === "tree" || kind === "resolve" ? [revision ?? "main", ...below] : ["main"];
  if (ofFile && below.length > 0) path.pop();
  return new URL(`https://huggingface.co/${owner}/${model}/resolve/${path.join("/")}`);
}

// The same for typed text: owner/model means Hugging Face, and https:// may be left out.
export function modelUrl(text) {
  const typed = text.trim();
  if (!typed) throw new SelkieError("not_found", "Give the address of a model's folder.");
  if (/^[\w-]+\/[\w.-]+$/.test(typed)) return new URL(directoryUrl(`https://huggingface.co/${typed}`));
  const whole = /^[a-z][a-z0-9+.-]*:\/\//i.test(typed);
  // A single word is not meant as a host.
  if (!whole && !/[./:]/.test(typed)) {
    throw new SelkieError("not_found", `"${typed}" is not an address. One looks like owner/model or https://huggingface.co/owner/model.`);
  }
  return new URL(directoryUrl(whole ? typed : `https://${typed}`));
}

function notAllowed({ protocol, host }, cause) {
  const allowed = "only its own server, https addresses and http://localhost";
  return new SelkieError("cors", `This page may not contact ${protocol}//${host}: ${allowed}.`, { cause });
}

export function fileUrl(directory, name) {
  const url = new URL(directory);
  url.pathname += encodeURIComponent(name);
  return url.href;
}

export function modelName(directory) {
  const parts = decodeURI(new URL(directory).pathname).split("/").filter(Boolean);
  const resolve = parts.indexOf("resolve");
  return (resolve > 0 ? parts[resolve - 1] : parts.at(-1)) ?? new URL(directory).host;
}

const sameOrigin = (url) => new URL(url).origin === self.location.origin;

// Hosts that the page's Content-Security-Policy blocked.
const refused = new Set();
self.addEventListener?.("securitypolicyviolation", (e) => refused.add(e.blockedURI));
const wasRefused = (url) => [...refused].some((blocked) => blocked && url.startsWith(blocked));

// One request; null if the file is not there.
async function request(url, { method = "GET", range, signal } = {}) {
  const headers = range ? { Range: `bytes=${range}` } : {};
  let response;
  try {
    // The model is stored separately, so the HTTP cache need not keep it.
    const options = { cache: "no-store", credentials: "same-origin", referrerPolicy: "no-referrer" };
    response = await fetch(url, { method, headers, signal, ...options });
  } catch (e) {
    if (e.name === "AbortError") throw e;
    await new Promise((resolve) => setTimeout(resolve)); // the violation's event comes after the rejection
    throw unreachable(url, e);
  }
  if (response.ok) {
    // Some sites answer every request with their start page: the file does not exist.
    const page = /^text\/html/.test(response.headers.get("content-type") ?? "");
    if (!page) return response;
  }
  response.body?.cancel();
  const { status } = response;
  if (response.ok || status === 404 || status === 410) return null;
  const host = new URL(url).host;
  const refuses = status === 401 || status === 403;
  const message = refuses ? `${host} refuses access to ${url}` : `${host} answers ${url} with an error`;
  throw new SelkieError("network", `${message} (status ${status}).`, { cause: { status } });
}

function unreachable(url, cause) {
  if (wasRefused(url)) return notAllowed(new URL(url), cause);
  const failed = (message) => new SelkieError("network", message, { cause });
  if (sameOrigin(url)) return failed(`The server of this page does not answer; ${url} could not be loaded.`);
  const { host } = new URL(url);
  return failed(
    `${url} could not be loaded: ${host} does not answer, or it does not allow other pages to read its files (CORS). ` +
      "A browser does not tell which. You can download the model and choose its folder instead.",
  );
}

// The size of the whole file if the response tells it, else null. The length of a compressed answer is not the file's size.
const contentLength = (response) => {
  const text = response.headers.get("content-encoding") ? null : response.headers.get("content-length");
  return text === null ? null : Number(text);
};

// Identifies the version of a file, from headers that are visible across origins.
const version = (response) => {
  const tag = response.headers.get("etag");
  return (tag && !tag.startsWith("W/") ? tag : null) ?? response.headers.get("last-modified");
};

// { size, version } of a file without reading it, null if it does not exist. Some servers answer HEAD with an error.
export async function look(url, signal) {
  try {
    const response = await request(url, { method: "HEAD", signal });
    return response && { size: contentLength(response), version: version(response) };
  } catch (e) {
    if (!e.cause?.status) throw e;
  }
  const response = await request(url, { range: "0-0", signal });
  response?.body?.cancel();
  const total = /\/(\d+)$/.exec(response?.headers.get("content-range") ?? "")?.[1];
  const size = response?.status === 206 ? (total && Number(total)) : response && contentLength(response);
  return response && { size: size ?? null, version: version(response) };
}

// Passes the pieces of a file, starting at `from`, to `write(piece, version)`; returns its size and version, null if it does not
// exist. A server without range requests, or with a version other than `expected`, sends the whole file: then `restart()` is
// called first.
export async function stream(url, { from = 0, expected = null, write, restart }) {
  let response;
  try {
    response = await request(url, { range: from > 0 ? `${from}-` : null });
  } catch (e) {
    if (from === 0 || e.cause?.status !== 416) throw e;
  }
  if (from > 0 && !(response?.status === 206 && expected !== null && version(response) === expected)) {
    await restart();
    from = 0;
    if (response?.status !== 200) {
      response?.body?.cancel();
      response = await request(url);
    }
  }
  if (!response) return null;
  const rest = contentLength(response);
  const reader = response.body.getReader();
  let at = from;
  for (;;) {
    const { done, value } = await reader.read().catch((e) => {
      const host = new URL(url).host;
      throw new SelkieError("network", `The connection to ${host} broke after ${at} bytes of ${url}. Try again.`, { cause: e });
    });
    if (done) break;
    await write(value, version(response));
    at += value.length;
  }
  // More bytes than announced: the answer was compressed. Fewer: the connection broke.
  if (rest !== null && at < from + rest) {
    throw new SelkieError("network", `${url} ended after ${at} of ${from + rest} bytes. Try again.`);
  }
  return { size: at, version: version(response) };
}

async function readSmall(directory, name, onBytes) {
  const parts = [];
  const write = (piece) => {
    parts.push(piece);
    onBytes?.(name, piece.length);
  };
  if (!(await stream(fileUrl(directory, name), { write }))) return null;
  const blob = new Blob(parts);
  await checkWhole(name, blob);
  return [name, blob];
}

// All small files of a model ({ name: Blob }), and names, sizes and versions of its weights.
// A missing optional file causes one failed request, which the browser shows in its console.
export async function remoteModel(directory, onBytes) {
  const config = await readSmall(directory, CONFIG, onBytes);
  if (!config) throw new SelkieError("not_found", `There is no model at ${directory}: ${CONFIG} was not found there.`);
  // Object stores like S3 may refuse access to a missing file instead of saying that it does not exist.
  let refused = null;
  const absent = (e) => {
    if (![401, 403].includes(e.cause?.status)) throw e;
    refused = e.cause.status;
    return null;
  };
  const get = (name) => readSmall(directory, name, onBytes).catch(absent);
  const optional = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"];
  const small = new Map([config, ...(await Promise.all(optional.map(get))).filter(Boolean)]);
  // The chat template is a separate file or part of the tokenizer's settings.
  const settings = small.get("tokenizer_config.json");
  if (!settings || !JSON.parse(await settings.text())?.chat_template) {
    const template = (await get("chat_template.jinja")) ?? (await get("chat_template.json"));
    if (template) small.set(...template);
  }
  // The page's own server has the demo model, which is a GGUF file; elsewhere safetensors are the rule.
  const own = sameOrigin(directory);
  const one = async (name) => {
    const found = await look(fileUrl(directory, name)).catch(absent);
    return found && { small, weights: [{ name, ...found }] };
  };
  const single = (own && (await one(GGUF))) || (await one(SINGLE));
  if (single) return single;
  const index = await get(INDEX);
  const last = !index && !own && (await one(GGUF));
  if (last) return last;
  if (!index) throw noWeights(`${GGUF} at ${directory}`, refused && `the server refuses files that were asked for (status ${refused})`);
  small.set(...index);
  const shards = shardNames(await index[1].text()).map(async (name) => {
    const found = await look(fileUrl(directory, name));
    if (!found) throw new SelkieError("missing_file", `${INDEX} names ${name}, but ${directory} does not have it.`);
    return { name, ...found };
  });
  return { small, weights: await Promise.all(shards) };
}

// A remote file that is read in parts: by range requests, or from the start of the whole file if the server has none.
export function remoteFile(directory, { name, size }) {
  const url = fileUrl(directory, name);
  const read = async (offset, length) => {
    const bytes = new Uint8Array(length);
    if (length === 0) return bytes;
    const response = await request(url, { range: `${offset}-${offset + length - 1}` });
    if (!response) throw new SelkieError("missing_file", `${url} is no longer there.`);
    let at = response.status === 206 ? offset : 0;
    const reader = response.body.getReader();
    try {
      while (at < offset + length) {
        const { done, value } = await reader.read();
        if (done) break;
        const part = value.subarray(Math.max(0, offset - at), Math.max(0, offset + length - at));
        if (part.length) bytes.set(part, Math.max(0, at - offset));
        at += value.length;
      }
    } catch (e) {
      throw asSelkieError(e, "network");
    } finally {
      reader.cancel().catch(() => {});
    }
    return bytes.subarray(0, Math.max(0, Math.min(length, at - offset)));
  };
  return { name, size: size ?? UNKNOWN_SIZE, read };
}
