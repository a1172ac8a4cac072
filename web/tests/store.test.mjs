// Models of a URL and of a folder: download, storage, and their errors.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { ROOT, blank, demoBytes, modelHost, profile, serve } from "./harness.mjs";

const WEIGHTS = "model.gguf";
const INDEX = "model.safetensors.index.json";
const site = await serve();

async function fresh() {
  const { context, errors } = await profile();
  return { context, errors, page: await blank(context, site.url) };
}

// Loads on the CPU, which starts fastest; returns the outcome.
const load = (page, url) =>
  page.evaluate(async (url) => {
    const stages = new Map();
    const totals = new Set();
    const onProgress = ({ stage, file, loaded, total }) => {
      stages.set(stage, { file, loaded, total });
      if (stage === "download") totals.add(total);
    };
    try {
      const engine = await selkie.load({ model: { url }, backend: "cpu", onProgress });
      const { from, storageProblem, name } = engine.info;
      engine.close();
      return { from, storageProblem, name, stages: Object.fromEntries(stages), totals: [...totals] };
    } catch (e) {
      return { code: e.code, message: e.message };
    }
  }, url);

const stored = async (page) => (await page.evaluate(() => selkie.storage())).models;
const kept = async (page) => (await stored(page)).filter(({ done }) => done);

test("a model is downloaded once and then read from storage, without its server", async () => {
  const { context, page } = await fresh();
  const host = await modelHost();
  const first = await load(page, host.url);
  assert.equal(first.from, "network");
  const { loaded, total } = first.stages.download;
  assert.equal(loaded, total);
  assert.deepEqual(first.totals.filter((seen) => seen !== 0), [total]);
  const [model] = await kept(page);
  assert.deepEqual({ ...model }, { url: host.url, bytes: loaded, done: true });
  assert.ok(total > demoBytes(WEIGHTS).length);
  assert.ok(host.log.every((line) => !/chat_template/.test(line)), `${host.log}`);
  await host.stop();
  const again = await load(page, host.url);
  assert.equal(again.from, "storage");
  assert.equal(again.stages.download, undefined);
  await page.evaluate((url) => selkie.forget(url), host.url);
  assert.deepEqual(await kept(page), []);
  assert.equal((await load(page, host.url)).code, "network");
  await context.close();
});

test("a download that broke goes on where it stopped, if the server has the same version", async () => {
  const { context, page } = await fresh();
  const host = await modelHost({ cut: { [WEIGHTS]: 5_000_000 } });
  const broken = await load(page, host.url);
  assert.equal(broken.code, "network");
  assert.match(broken.message, /Try again/);
  const [{ url, bytes, done }] = await stored(page);
  assert.deepEqual([url, done], [host.url, false]);
  delete host.rules.cut;
  host.log.length = 0;
  const { from, stages } = await load(page, host.url);
  assert.equal(from, "network");
  // A browser may lose the end of what arrived, so how far the first try came is for storage to say.
  const others = stages.download.total - demoBytes(WEIGHTS).length;
  assert.ok(bytes > others, `${bytes} of ${others} bytes beside the weights`);
  assert.ok(host.log.includes(`GET ${WEIGHTS} bytes=${bytes - others}-`), `${host.log}`);
  await context.close();
});

for (const [what, change] of [
  ["the server has another version", (rules) => (rules.etag = '"2"')],
  ["the server does not know ranges", (rules) => (rules.ranges = false)],
  ["the server names no version", (rules) => (rules.etag = null)],
]) {
  test(`a download that broke starts anew if ${what}`, async () => {
    const { context, page } = await fresh();
    const host = await modelHost({ cut: { [WEIGHTS]: 5_000_000 } });
    assert.equal((await load(page, host.url)).code, "network");
    delete host.rules.cut;
    change(host.rules);
    const { from, stages } = await load(page, host.url);
    assert.equal(from, "network");
    assert.equal(stages.download.loaded, stages.download.total);
    await context.close();
  });
}

test("a page that is closed while it loads leaves nothing that is taken for whole", async () => {
  const { context, page } = await fresh();
  const host = await modelHost({ cut: { [WEIGHTS]: 5_000_000 } });
  host.rules.hang = [];
  const other = await blank(context, site.url);
  const coming = other.evaluate((url) => new Promise((resolve) => {
    selkie.load({ model: { url }, backend: "cpu", onProgress: (p) => p.loaded > 1e6 && resolve() }).catch(() => {});
  }), host.url);
  await coming;
  await other.close();
  assert.deepEqual((await stored(page)).map(({ url, done }) => [url, done]), [[host.url, false]]);
  delete host.rules.cut;
  assert.equal((await load(page, host.url)).from, "network");
  await context.close();
});

test("a download of unknown size has no total", async () => {
  const { context, page } = await fresh();
  const { from, totals, stages } = await load(page, (await modelHost({ unsized: true })).url);
  assert.equal(from, "network");
  assert.deepEqual(totals, [0]);
  assert.ok(stages.download.loaded > 0);
  await context.close();
});

test("newer weights on the page's own server are downloaded; until they can be, the old ones are used", async () => {
  const { context, page } = await fresh();
  const url = new URL("models/demo/", site.url).href;
  assert.equal((await load(page, url)).from, "network");
  const head = { status: 200, headers: { etag: '"newer"', "content-length": `${demoBytes(WEIGHTS).length}` } };
  const newer = (route) => (route.request().method() === "HEAD" ? route.fulfill(head) : route.continue());
  await context.route(`${url}${WEIGHTS}`, newer);
  await context.route(`${url}config.json`, (route) => route.abort());
  assert.equal((await load(page, url)).from, "storage");
  assert.equal((await kept(page)).length, 1);
  await context.unroute(`${url}config.json`);
  assert.equal((await load(page, url)).from, "network");
  await context.close();
});

test("a load can be cancelled", async () => {
  const { context, page } = await fresh();
  const host = await modelHost({ hang: [WEIGHTS] });
  const error = await page.evaluate((url) => {
    const abort = new AbortController();
    setTimeout(() => abort.abort(), 200);
    return failure(selkie.load({ model: { url }, signal: abort.signal }));
  }, host.url);
  assert.equal(error.code, "cancelled");
  delete host.rules.hang;
  assert.equal((await load(page, host.url)).from, "network");
  await context.close();
});

test("two tabs download a model once", async () => {
  const { context, page } = await fresh();
  const host = await modelHost();
  const other = await blank(context, site.url);
  const results = await Promise.all([load(page, host.url), load(other, host.url)]);
  assert.deepEqual(results.map(({ from }) => from).sort(), ["network", "storage"]);
  assert.equal(host.log.filter((line) => line.startsWith(`GET ${WEIGHTS}`)).length, 1);
  await context.close();
});

test("shards by their index, and chat templates in files of their own", async () => {
  const { context, page } = await fresh();
  const names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
  // A random model of the demo's family, with its words.
  const golden = join(ROOT, "tests/golden/nemotron_h");
  const bytes = readFileSync(join(golden, "model.safetensors"));
  const length = Number(bytes.readBigUInt64LE());
  const header = JSON.parse(bytes.subarray(8, 8 + length));
  const bodies = { "config.json": readFileSync(join(golden, "config.json")) };
  const weight_map = {};
  const tensors = Object.entries(header).filter(([name]) => name !== "__metadata__");
  names.forEach((file, i) => {
    const part = {};
    const data = [];
    let at = 0;
    for (const [name, tensor] of tensors.filter((_, n) => n % 2 === i)) {
      const [from, to] = tensor.data_offsets;
      data.push(bytes.subarray(8 + length + from, 8 + length + to));
      part[name] = { ...tensor, data_offsets: [at, at + to - from] };
      at += to - from;
      weight_map[name] = file;
    }
    const head = Buffer.from(JSON.stringify(part));
    const size = Buffer.alloc(8);
    size.writeBigUInt64LE(BigInt(head.length));
    bodies[file] = Buffer.concat([size, head, ...data]);
  });
  bodies[INDEX] = JSON.stringify({ metadata: {}, weight_map });
  const settings = JSON.parse(demoBytes("tokenizer_config.json"));
  bodies["chat_template.jinja"] = settings.chat_template;
  delete settings.chat_template;
  bodies["tokenizer_config.json"] = JSON.stringify(settings);
  // Some servers refuse access to missing files.
  const host = await modelHost({ bodies, status: { [WEIGHTS]: 403, "generation_config.json": 403 } });
  assert.equal((await load(page, host.url)).from, "network");
  assert.ok(host.log.includes("GET chat_template.jinja"));

  const incomplete = await modelHost({ bodies: { ...bodies, [names[1]]: undefined }, missing: [WEIGHTS] });
  const error = await load(page, incomplete.url);
  assert.equal(error.code, "missing_file");
  assert.match(error.message, /model-00002-of-00002/);
  const escape = { ...bodies, [INDEX]: '{"weight_map": {"a": "../../x.safetensors"}}' };
  assert.equal((await load(page, (await modelHost({ bodies: escape, missing: [WEIGHTS] })).url)).code, "bad_model");
  await context.close();
});

for (const [what, rules, code, message] of [
  ["no model at a URL", { missing: ["config.json"] }, "not_found", /There is no model at http:\/\/localhost.*config\.json/],
  ["no weights", { missing: [WEIGHTS] }, "missing_file", /neither model\.safetensors nor model\.safetensors\.index\.json nor model\.gguf/],
  ["no weights, or none for everybody", { status: { [WEIGHTS]: 403, [INDEX]: 403 } }, "missing_file", /neither.*status 403/],
  ["a server that refuses", { status: { "config.json": 403 } }, "network", /status 403/],
  ["a server with a fault", { status: { [WEIGHTS]: 500 } }, "network", /status 500/],
  ["a server without CORS", { cors: false }, "network", /does not answer, or it does not allow other pages.*CORS/],
  ["weights cut short", { cut: { [WEIGHTS]: 5_000_000 }, unsized: true }, "bad_model", /ends after 5000000 of/],
  ["a config that is no JSON", { bodies: { "config.json": "{" } }, "bad_model", /config\.json/],
  ["a family that there is not", { bodies: { "config.json": '{"model_type": "unheard_of"}' } }, "unsupported", /unheard_of/],
]) {
  test(`bad URL: ${what}`, async () => {
    const { context, page } = await fresh();
    const host = await modelHost(rules);
    const error = await load(page, host.url);
    assert.equal(error.code, code, error.message);
    assert.match(error.message, message);
    assert.deepEqual((await kept(page)).filter(() => code !== "unsupported"), []);
    await page.evaluate((url) => selkie.forget(url), host.url);
    assert.deepEqual(await stored(page), []);
    await context.close();
  });
}

test("addresses that a page may not contact, and no addresses", async () => {
  const { context, page } = await fresh();
  const refused = await load(page, "http://127.0.0.1:9/model/");
  assert.equal(refused.code, "cors");
  assert.match(refused.message, /may not contact http:\/\/127\.0\.0\.1:9/);
  assert.equal((await load(page, "file:///etc/")).code, "cors");
  assert.equal((await load(page, "http://")).code, "not_found");
  assert.equal((await load(page, "http://localhost:9/")).code, "network");
  await context.close();
});

test("addresses as a person types them", async () => {
  const { context, page } = await fresh();
  const hub = "https://huggingface.co/a/b/resolve";
  for (const [text, expected] of [
    [" a/b.c ", "https://huggingface.co/a/b.c/resolve/main/"],
    ["https://huggingface.co/a/b", `${hub}/main/`],
    ["huggingface.co/a/b/tree/v2?x=1#y", `${hub}/v2/`],
    ["https://hf.co/a/b/blob/v2/sub/model.safetensors", `${hub}/v2/sub/`],
    ["https://huggingface.co/a/b/blob/main/README.md", `${hub}/main/`],
    ["https://huggingface.co/a/b/resolve/main/config.json", `${hub}/main/`],
    ["https://huggingface.co/a/b/discussions/3", `${hub}/main/`],
    ["example.org/models/x", "https://example.org/models/x/"],
    ["https://example.org/x/model.safetensors.index.json?key=1", "https://example.org/x/?key=1"],
    ["http://localhost:8000/x", "http://localhost:8000/x/"],
    ["", "not_found: Give the address of a model's folder."],
    ["https://", "not_found: This is not an address. One looks like https://huggingface.co/name/model."],
    ["hf.co/a", "not_found: A model on Hugging Face has an owner and a name: https://huggingface.co/owner/model."],
    ["http://example.org/x", "cors: This page may not contact http://example.org: only its own server, https addresses and http://localhost."],
    ["hello", 'not_found: "hello" is not an address. One looks like owner/model or https://huggingface.co/owner/model.'],
  ]) {
    const got = await page.evaluate((text) => {
      try {
        return selkie.modelUrl(text).href;
      } catch (e) {
        return `${e.code}: ${e.message}`;
      }
    }, text);
    assert.equal(got, expected);
  }
  await context.close();
});

test("a look at the headers downloads no weights", async () => {
  const { context, page } = await fresh();
  for (const rules of [{}, { ranges: false }, { head: 403 }, { head: 405, ranges: false }]) {
    const host = await modelHost(rules);
    const info = await page.evaluate((url) => selkie.inspect({ url }, { backend: "cpu" }), host.url);
    assert.equal(info.family, JSON.parse(demoBytes("config.json")).model_type);
    assert.equal(info.fits, true, info.problem);
    assert.ok(info.downloadBytes > demoBytes(WEIGHTS).length);
    assert.deepEqual(await kept(page), []);
  }
  await context.close();
});

// A browser whose storage fails in a certain way: in the script `file`, `code` is replaced.
async function crippled(file, ...replacements) {
  const { context } = await profile();
  await context.route(`**/js/${file}`, async (route) => {
    const response = await route.fetch();
    let body = await response.text();
    for (const [code, other] of replacements) {
      assert.ok(body.includes(code), code);
      body = body.replace(code, other);
    }
    await route.fulfill({ response, body });
  });
  return { context, page: await blank(context, site.url) };
}

const NO_FILES = ["await navigator.storage.getDirectory()", "await Promise.reject(new DOMException('no', 'SecurityError'))"];
const NO_CACHE = ["await caches.open(FOLDER)", "await Promise.reject(new DOMException('no', 'SecurityError'))"];

test("without storage a model is kept in memory, and that is said", async () => {
  const { context, page } = await crippled("shelf.js", NO_FILES, NO_CACHE);
  const { from, storageProblem } = await load(page, (await modelHost()).url);
  assert.equal(from, "memory");
  assert.match(storageProblem, /does not let this page store anything/);
  assert.equal((await page.evaluate(() => selkie.storage())).kind, "memory");
  await context.close();
});

test("the Cache API keeps models where there is no private file system", async () => {
  const { context, page } = await crippled("shelf.js", NO_FILES);
  const host = await modelHost();
  assert.equal((await load(page, host.url)).from, "network");
  await host.stop();
  assert.equal((await load(page, host.url)).from, "storage");
  const { kind, models } = await page.evaluate(() => selkie.storage());
  assert.equal(kind, "cache");
  assert.equal(models.length, 1);
  await page.evaluate((url) => selkie.forget(url), host.url);
  assert.deepEqual(await kept(page), []);
  await context.close();
});

test("a removal that is broken off leaves nothing that is taken for whole", async () => {
  const { context, page } = await crippled("shelf.js", ["await optional(this.root.removeEntry(", "throw new Error('closed'); (("]);
  const host = await modelHost();
  assert.equal((await load(page, host.url)).from, "network");
  assert.match((await page.evaluate((url) => failure(selkie.forget(url)), host.url)).message, /closed/);
  assert.deepEqual(await kept(page), []);
  assert.equal((await load(page, host.url)).from, "network");
  await context.close();
});

test("too little room is known before the download", async () => {
  const { context, page } = await crippled("store.js", ["navigator.storage?.estimate?.()", "{ usage: 0, quota: 3_000_000 }"]);
  const { from, storageProblem } = await load(page, (await modelHost()).url);
  assert.equal(from, "memory");
  assert.match(storageProblem, /has room for 2\.9 MiB more, the model needs 8\.1 MiB/);
  await context.close();
});

test("a storage that gets full on the way", async () => {
  const { context, page } = await fresh();
  const session = await context.newCDPSession(page);
  const { origin } = new URL(site.url);
  await session.send("Storage.overrideQuotaForOrigin", { origin, quotaSize: 3_000_000 });
  const { from, storageProblem, stages, message } = await load(page, (await modelHost()).url);
  assert.equal(from, "memory", message);
  assert.match(storageProblem, /could not be kept in the browser/);
  assert.equal(stages.download.loaded, stages.download.total);
  assert.deepEqual(await kept(page), []);
  await context.close();
});

// A picked folder, as an <input webkitdirectory> gives it.
const pick = (page, files) =>
  page.evaluate(async (files) => {
    const picked = files.map(({ path, base64 }) => {
      const file = new File([Uint8Array.from(atob(base64), (c) => c.charCodeAt(0))], path.split("/").at(-1));
      Object.defineProperty(file, "webkitRelativePath", { value: path });
      return file;
    });
    try {
      const engine = await selkie.load({ model: { files: picked }, backend: "cpu" });
      const { from, name } = engine.info;
      engine.close();
      return { from, name };
    } catch (e) {
      return { code: e.code, message: e.message };
    }
  }, files.map(([path, bytes]) => ({ path, base64: Buffer.from(bytes).toString("base64") })));

test("a folder from disk", async () => {
  const { context, page } = await fresh();
  const names = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", WEIGHTS];
  const files = names.map((name) => [`my-model/${name}`, demoBytes(name)]);
  const below = [["my-model/onnx/config.json", "{"], ["my-model/README.md", "x"]];
  assert.deepEqual({ ...(await pick(page, [...below, ...files])) }, { from: "files", name: "my-model" });
  const deeper = files.map(([path, bytes]) => [`downloads/${path}`, bytes]);
  assert.deepEqual({ ...(await pick(page, [["downloads/notes.txt", "x"], ...deeper])) }, { from: "files", name: "my-model" });
  const without = (name) => files.filter(([path]) => !path.endsWith(`/${name}`));
  for (const [chosen, code, message] of [
    [[], "missing_file", /No files/],
    [without("config.json"), "missing_file", /no config\.json/],
    [without(WEIGHTS), "missing_file", /neither model\.safetensors/],
    [[...without(WEIGHTS), ["my-model/pytorch_model.bin", "x"]], "missing_file", /pytorch_model\.bin has to be converted/],
    [[...without(WEIGHTS), ["my-model/model.safetensors.index.json", '{"weight_map":{"a":"model-1.safetensors"}}']], "missing_file", /names model-1/],
    [[...without(WEIGHTS), [`my-model/${WEIGHTS}`, demoBytes(WEIGHTS).subarray(0, 100_000)]], "bad_model", /model\.gguf/],
    [[...without(WEIGHTS), [`my-model/${WEIGHTS}`, "junk"]], "bad_model", /model\.gguf/],
    [[...without("config.json"), ["my-model/config.json", "{"]], "bad_model", /config\.json/],
  ]) {
    const error = await pick(page, chosen);
    assert.equal(error.code, code, error.message);
    assert.match(error.message, message);
  }
  await context.close();
});
