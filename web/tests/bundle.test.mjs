// Bundles between the native program and the page: a chat that one of them began goes on in the other, from its state.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { copyFileSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { DEMO, SELKIE, answers, atEnd, blank, demoBytes, modelHost, modelServer, openPage, profile, say, serve } from "./harness.mjs";

const site = await serve();
const home = mkdtempSync(join(tmpdir(), "selkie-bundle-"));
atEnd(() => rmSync(home, { recursive: true, force: true }));
const TALK = ["Tell me a story about a fox named Leo and a lantern.", "What is 17 + 25?"];
const NEXT = "Who has the lantern?";
const SYSTEM = "Your name is Iris.";

function run(args, input = "") {
  const { status, stdout, stderr } = spawnSync(SELKIE, args, { input, encoding: "utf8", timeout: 120_000 });
  return { status, stdout, stderr };
}

// A chat in the terminal: the last answer, and what was said on stderr.
function chat(backend, lines, ...more) {
  const { status, stdout, stderr } = run(["chat", "--backend", backend, "--max-tokens", "80", ...more], lines.map((line) => `${line}\n`).join(""));
  assert.equal(status, 0, stderr);
  return { answer: stdout.trim().split("\n").at(-1), notes: stderr };
}

// Where there is no Vulkan driver, another backend than the page's is the CPU of this machine: its numerics are not wasm's.
const hasVulkan = / wgpu +0 /.test(` ${run(["devices"]).stdout.replaceAll("\n", " ")}`);
if (process.env.SELKIE_REQUIRE?.split(",").includes("wgpu")) assert.ok(hasVulkan, "there is no Vulkan device");
const OTHER = { cpu: hasVulkan ? "wgpu" : "cpu", wgpu: "cpu" };

const file = (name) => join(home, name);
const picked = (name, buffer = readFileSync(file(name))) => ({ name, mimeType: "application/octet-stream", buffer });
const facts = (page) => page.locator(".turn.assistant .facts").last().innerText();
// What was imported is drawn in the frames after the notice, and what lies out of sight has no `innerText`.
const asked = (page, texts) => page.waitForFunction((wanted) => JSON.stringify([...document.querySelectorAll(".turn.user .body")].map((body) => body.textContent)) === wanted, JSON.stringify(texts));
const noticed = (page, what) => page.waitForFunction((source) => new RegExp(source).test(document.getElementById("notice").textContent), what.source);

// What the page hands to the user as the shown chat with its states.
async function exported(page, name) {
  await page.click("#export-menu summary");
  const [download] = await Promise.all([page.waitForEvent("download"), page.click("#export-bundle")]);
  assert.match(download.suggestedFilename(), /^Tell me a story .*\.bundle$/);
  await download.saveAs(file(name));
  return file(name);
}

for (const webgpu of [false, true]) {
  const own = webgpu ? "wgpu" : "cpu", other = OTHER[own];
  test(`a chat begun on ${other} goes on in the page on ${own === "wgpu" ? "WebGPU" : "the CPU"}, and back`, async (t) => {
    const begun = file(`${own}.bundle`);
    chat(other, TALK, "--system", SYSTEM, "--save", begun);
    const native = chat(other, [NEXT], "--load", begun);

    const { context, page, errors } = await openPage(site.url, { webgpu, viewport: { width: 1280, height: 860 } });
    await page.click("#toggle-chats");
    await page.setInputFiles("#import-file", picked(`${own}.bundle`));
    await noticed(page, /Imported 1 chat\. \d+ of \d+ tokens need not be computed: their values were computed elsewhere and are converted\. It keeps its own system prompt\./);
    t.diagnostic(await page.innerText("#notice"));
    await asked(page, TALK);
    assert.equal(await answers(page).nth(1).innerText(), "17 + 25 = 42.");
    assert.equal(await say(page, NEXT), native.answer);
    const said = await facts(page);
    t.diagnostic(said);
    const [, reused, of] = /([\d,]+) of ([\d,]+) prompt tokens reused, converted/.exec(said);
    assert.ok(Number(reused) >= 64 && Number(reused) < Number(of), said);

    const back = await exported(page, `back-${own}.bundle`);
    const checked = run(["bundle", "verify", back, "-m", DEMO]);
    assert.match(checked.stdout, /all checksums are right, and it is of the model/, checked.stderr);
    const { numerics } = JSON.parse(run(["bundle", "inspect", back, "--json"]).stdout);
    // Values that were computed from converted ones are exact nowhere.
    assert.match(numerics, new RegExp(`^${other} .* > ${own} `), numerics);
    t.diagnostic(numerics);
    const home = chat("cpu", [TALK[1]], "--load", back);
    assert.equal(home.answer, "17 + 25 = 42.");
    assert.match(home.notes, /converted, reused \d+ of/);
    const refused = run(["chat", "--backend", "cpu", "--load", back, "--exact-only"], "");
    assert.notEqual(refused.status, 0);
    assert.deepEqual(errors, []);
    await context.close();
  });
}

// Another machine's bundle: `selkie chat --system "Your name is Iris." --save FILE` with the lines of TALK. What the page exports lies beside it.
const brought = process.env.SELKIE_BUNDLE;
if (brought) test("a chat of another machine goes on in the page", async (t) => {
  for (const webgpu of [false, true]) {
    const { context, page, errors } = await openPage(site.url, { webgpu, viewport: { width: 1280, height: 860 } });
    await page.click("#toggle-chats");
    await page.setInputFiles("#import-file", picked("brought.bundle", readFileSync(brought)));
    await noticed(page, /Imported 1 chat\. \d+ of \d+ tokens need not be computed: their values were computed elsewhere and are converted\./);
    await asked(page, TALK);
    t.diagnostic(await say(page, NEXT));
    const said = await facts(page);
    t.diagnostic(said);
    assert.match(said, /prompt tokens reused, converted/);
    const back = await exported(page, "brought-back.bundle");
    copyFileSync(back, `${brought}.${webgpu ? "webgpu" : "cpu"}`);
    t.diagnostic(JSON.parse(run(["bundle", "inspect", back, "--json"]).stdout).numerics);
    assert.deepEqual(errors, []);
    await context.close();
  }
});

test("a chat with the server's model goes on in a page without it", async () => {
  const server = await modelServer();
  const first = await openPage(server.url, { viewport: { width: 1280, height: 860 } });
  for (const text of TALK) await say(first.page, text);
  await first.page.click("#toggle-chats");
  await first.page.setInputFiles("#import-file", picked("x.bundle", Buffer.alloc(3)));
  await noticed(first.page, /A model that runs in this page can go on with a bundle/);
  const bundle = await exported(first.page, "server.bundle");
  const expected = await say(first.page, NEXT);
  await first.context.close();
  server.stop();

  const { context, page, errors } = await openPage(site.url, { viewport: { width: 1280, height: 860 } });
  await context.setOffline(true);
  await page.click("#toggle-chats");
  // Dropped on the page.
  const data = await page.evaluateHandle((text) => {
    const data = new DataTransfer();
    data.items.add(new File([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], "server.bundle"));
    return data;
  }, readFileSync(bundle).toString("base64"));
  await page.dispatchEvent("body", "drop", { dataTransfer: data });
  await noticed(page, /Imported 1 chat\..*converted/);
  await asked(page, TALK);
  assert.equal(await say(page, NEXT), expected);
  assert.match(await facts(page), /prompt tokens reused, converted/);
  assert.deepEqual(errors, []);
  await context.close();
});

test("damaged bundles are refused by name, and the page goes on", async () => {
  const whole = file("whole.bundle");
  chat("cpu", TALK, "--save", whole);
  const bytes = readFileSync(whole), header = JSON.parse(bytes.subarray(8, 8 + Number(bytes.readBigUInt64LE(0))));
  const name = Object.keys(header).find((name) => name.includes(".recurrent."));
  const altered = Buffer.from(bytes);
  altered[8 + Number(bytes.readBigUInt64LE(0)) + header[name].data_offsets[0] + 5] ^= 1;
  const changed = Buffer.from(bytes);
  changed.write("0", changed.indexOf('"weights":"') + 11);
  const made = run(["bundle", "make", "--backend", "cpu", "--raw", TALK.join(" ").repeat(3), "-o", file("text.bundle")]);
  assert.equal(made.status, 0, made.stderr);

  const { context, page, errors } = await openPage(site.url, { viewport: { width: 1280, height: 860 } });
  await page.click("#toggle-chats");
  for (const [label, buffer, why] of [
    ["cut.bundle", bytes.subarray(0, -100), /cut\.bundle: .*truncated/],
    ["altered.bundle", altered, new RegExp(`altered\\.bundle: tensor \`${name.replaceAll(".", "\\.")}\` does not have the checksum`)],
    ["header.bundle", changed, /header\.bundle: the header does not have the checksum/],
    ["empty.bundle", Buffer.alloc(3), /empty\.bundle: a file of 3 bytes is not a bundle/],
    ["text.bundle", readFileSync(file("text.bundle")), /text\.bundle holds no conversation/],
  ]) {
    await page.setInputFiles("#import-file", picked(label, buffer));
    await noticed(page, why);
  }
  assert.equal(await page.locator("#chat-list .open").count(), 0);
  await page.click("#export-menu summary");
  await page.click("#export-bundle");
  await noticed(page, /nothing to export yet/);
  assert.equal(await say(page, "What is 17 + 25?"), "17 + 25 = 42.");
  assert.doesNotMatch(await facts(page), /converted/);
  await page.click("#export-menu summary");
  await page.click("#export-bundle");
  await noticed(page, /holds nothing of these \d+ tokens to save/);
  assert.deepEqual(errors, []);
  await context.close();
});

test("a bundle of another model is refused, and one that needs more memory than there is", async () => {
  chat("cpu", TALK, "--save", file("model.bundle"));
  const config = JSON.parse(demoBytes("config.json"));
  const host = await modelHost({ bodies: { "config.json": JSON.stringify({ ...config, unused: 1 }) } });
  const { context } = await profile({ webgpu: false });
  const page = await blank(context, site.url);
  page.setDefaultTimeout(120_000);
  const [other, huge, text] = await page.evaluate(async ({ url, bundle }) => {
    const engine = await selkie.load({ model: { url }, backend: "cpu" });
    const other = await failure(engine.loadState(Uint8Array.from(atob(bundle), (c) => c.charCodeAt(0))));
    // Tokens of 2 GiB, which the file has, and the module has no memory for.
    const tokens = 2 ** 29, digest = "0".repeat(64);
    const meta = { format: "selkie-bundle", version: "1", model: "x", weights: digest, config: digest, tokenizer: digest, numerics: "x" };
    const at = (dtype, shape, from, to) => ({ dtype, shape, data_offsets: [from, to] });
    const end = 4 * tokens;
    const json = JSON.stringify({ __metadata__: meta, tokens: at("U32", [tokens], 0, end), ends: at("U32", [0], end, end), checksums: at("U8", [3, 32], end, end + 96) });
    const header = new TextEncoder().encode(json.padEnd(Math.ceil(json.length / 8) * 8));
    const length = new Uint8Array(new BigUint64Array([BigInt(header.length)]).buffer);
    const zeros = new Blob([new Uint8Array(2 ** 24)]);
    const huge = await failure(engine.loadState(new Blob([length, header, ...Array(end / 2 ** 24).fill(zeros), new Uint8Array(96)])));
    const { text } = await engine.generate({ messages: [{ role: "user", content: "What is 17 + 25?" }] }).done;
    engine.close();
    return [other, huge, text];
  }, { url: host.url, bundle: readFileSync(file("model.bundle")).toString("base64") });
  assert.equal(other.code, "bad_model");
  assert.match(other.message, /this bundle is of another model .*its config digest begins with/);
  assert.equal(huge.code, "out_of_memory", huge.message);
  assert.equal(text, "17 + 25 = 42.");
  await context.close();
});

test("the API: exact values need no origin, converted ones do, and other requests see neither", async () => {
  chat(OTHER.cpu, TALK, "--save", file("other.bundle"));
  const { context } = await profile({ webgpu: false });
  const page = await blank(context, site.url);
  page.setDefaultTimeout(120_000);
  const result = await page.evaluate(async ({ other, talk, next }) => {
    const load = () => selkie.load({ model: { url: "/models/demo/" }, backend: "cpu" });
    const ask = async (engine, messages, more = {}) => (await engine.generate({ messages, maxTokens: 16, temperature: 0, ...more }).done);
    const engine = await load();
    const messages = [{ role: "user", content: talk }];
    messages.push({ role: "assistant", content: (await engine.generate({ messages, maxTokens: 100 }).done).text });
    const saved = await engine.saveState({ messages });
    const then = [...messages, { role: "user", content: next }];
    const expected = await ask(engine, then);
    engine.close();

    const fresh = await load();
    const own = await fresh.loadState(saved.blob, { exactOnly: true });
    const exact = await ask(fresh, then);
    // Bytes instead of a file; another tenant.
    const bytes = Uint8Array.from(atob(other), (c) => c.charCodeAt(0));
    const refused = await failure(fresh.loadState(bytes, { exactOnly: true }));
    const loaded = await fresh.loadState(bytes);
    const rest = [...loaded.messages, { role: "user", content: next }];
    const without = await ask(fresh, rest, { namespace: "a" });
    const plain = await ask(fresh, rest, { namespace: "b", origin: loaded.origin });
    const converted = await ask(fresh, rest, { origin: loaded.origin });
    const unknown = await failure(fresh.loadState(bytes, { exact_only: true }));
    fresh.close();
    return { saved: { ...saved, size: saved.blob.size }, own, expected, exact, refused, loaded, without, plain, converted, unknown };
  }, { other: readFileSync(file("other.bundle")).toString("base64"), talk: TALK[0], next: NEXT });
  const { saved, own, expected, exact, refused, loaded, without, plain, converted, unknown } = result;
  assert.ok(saved.tokens >= 64 && saved.tokens % 64 === 0 && saved.bytes === saved.size, JSON.stringify(saved));
  assert.deepEqual([own.converted, own.origin, own.tokens], [false, "", saved.tokens]);
  assert.equal(exact.text, expected.text);
  assert.deepEqual([exact.usage.reused, exact.usage.converted], [expected.usage.reused, false]);
  assert.equal(refused.code, "bad_request");
  assert.match(refused.message, /^the bundle: its values come from/);
  assert.ok(loaded.converted && loaded.origin === loaded.numerics && loaded.tokens >= 64, JSON.stringify(loaded));
  assert.deepEqual([without.usage.reused, plain.usage.reused], [0, 0]);
  assert.ok(converted.usage.converted && converted.usage.reused >= 64, JSON.stringify(converted.usage));
  assert.equal(converted.text, without.text);
  assert.match(unknown.message, /did you mean "exactOnly"/);
  await context.close();
});
