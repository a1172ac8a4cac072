// Chats on the page: many of them, in two tabs, through a reload in mid-answer, exported and imported; versions of answers; a
// chat that outgrows the context; the model of the last visit.

import assert from "node:assert/strict";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { DEMO, DIST, answers, atEnd, idle, modelHost, openPage, picture, ready, say, serve } from "./harness.mjs";

const site = await serve();
const open = (options) => openPage(site.url, options);

// The page with the demo model cut to a context that a few turns fill.
const SHORT = mkdtempSync(join(tmpdir(), "selkie-short-"));
atEnd(() => rmSync(SHORT, { recursive: true }));
cpSync(DIST, SHORT, { recursive: true });
const demo = JSON.parse(readFileSync(join(DEMO, "config.json"), "utf8"));
writeFileSync(join(SHORT, "models/demo/config.json"), JSON.stringify({ ...demo, max_position_embeddings: 2048 }));
const short = await serve(SHORT);

const STORY = "Tell me a story about a fox named Leo and a lantern.";
const wide = { viewport: { width: 1280, height: 860 } };

const users = (page) => page.locator(".turn.user .body");
const titles = (page) => page.locator("#chat-list .title").allInnerTexts();
const listed = (page, count) => page.waitForFunction((count) => document.querySelectorAll("#chat-list .open").length === count, count);
const notice = (page) => page.innerText("#notice");
const kept = (page) => page.evaluate(async () => (await import("/store.js")).chats.all());
// Waits until the page's messages are in the database.
const settled = (page, has) => page.waitForFunction(async (has) => (await (await import("/store.js")).chats.all()).some((chat) => JSON.stringify(chat.entries).includes(has)), has);

test("chats are listed, opened, renamed, searched, deleted and brought back", async () => {
  const { context, page, errors } = await open(wide);
  await say(page, "What is 17 + 25?");
  await page.click("#new-chat");
  assert.match(await notice(page), /^New chat\.\s*Undo$/);
  await page.click("#notice button");
  await page.waitForFunction(() => document.querySelectorAll(".turn").length === 2);
  await page.click("#new-chat");
  await say(page, "What is 81 - 36?");
  await page.click("#toggle-chats");
  await listed(page, 2);
  assert.deepEqual(await titles(page), ["What is 81 - 36?", "What is 17 + 25?"]);

  await page.click("#chat-list li:nth-child(2) .open");
  await page.waitForFunction(() => document.querySelector(".turn.user .body").textContent === "What is 17 + 25?");
  assert.equal(await page.locator("#chat-list [aria-current] .title").innerText(), "What is 17 + 25?");
  await page.hover("#chat-list li:nth-child(2)");
  await page.click('#chat-list li:nth-child(2) [title="Rename"]');
  await page.keyboard.type("Sums");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.title === "Sums · selkie");
  await page.fill("#chat-search", "45");
  await listed(page, 1);
  assert.deepEqual(await titles(page), ["What is 81 - 36?"]);
  await page.fill("#chat-search", "no such words");
  await page.waitForFunction(() => document.getElementById("chats-hint").textContent === "No chat has these words.");
  await page.fill("#chat-search", "");
  await listed(page, 2);

  // A chat that is deleted while it is answered stays deleted.
  await page.click("#new-chat");
  await page.fill("#message", STORY);
  await page.press("#message", "Enter");
  await listed(page, 3);
  await page.waitForFunction(() => document.querySelector(".turn.assistant .body")?.textContent.length > 20);
  await page.hover("#chat-list li:has([aria-current])");
  await page.click(`#chat-list [aria-label="Delete ${STORY}"]`);
  await idle(page);
  await page.waitForTimeout(1500);
  assert.deepEqual((await kept(page)).map(({ title }) => title).sort(), ["Sums", "What is 81 - 36?"]);
  await page.click("#chat-list li:has(.open:not([aria-current])) .open >> text=Sums");
  await page.waitForFunction(() => document.querySelector(".turn.user .body")?.textContent === "What is 17 + 25?");

  await page.hover("#chat-list li:has([aria-current])");
  await page.click('#chat-list [aria-label="Delete Sums"]');
  await listed(page, 1);
  assert.equal(await page.locator(".turn").count(), 0);
  await page.click("#notice button");
  await listed(page, 2);
  assert.deepEqual(await users(page).allInnerTexts(), ["What is 17 + 25?"]);
  await picture(page, "chats");
  await page.reload();
  await ready(page);
  assert.deepEqual(await users(page).allInnerTexts(), ["What is 17 + 25?"]);
  assert.deepEqual((await titles(page)).sort(), ["Sums", "What is 81 - 36?"]);
  assert.deepEqual(errors, []);
  await context.close();
});

test("two tabs lose nothing: they show the same chat, and part where both go on with it", async () => {
  const { context, page } = await open(wide);
  await say(page, "What is 17 + 25?");
  const other = await context.newPage();
  await other.goto(site.url);
  await ready(other);
  assert.deepEqual(await users(other).allInnerTexts(), ["What is 17 + 25?"]);
  await say(other, "What is 81 - 36?");
  // The chat may be shown before its answer is stored.
  await page.waitForFunction(() => document.querySelectorAll(".turn.assistant .body")[1]?.innerText === "81 - 36 = 45.");
  assert.equal(await page.locator(".turn").count(), 4);
  await page.waitForFunction(() => !document.querySelector(".turn.busy"));

  // Both at a time: neither has seen the other's message.
  await Promise.all([[page, "What is 1 + 1?"], [other, "What is 2 + 2?"]].map(([tab, text]) => tab.evaluate((text) => {
    const box = document.getElementById("message");
    box.value = text;
    document.getElementById("composer").requestSubmit();
  }, text)));
  await Promise.all([page, other].map(idle));
  for (const text of ["What is 1 + 1?", "What is 2 + 2?"]) await settled(page, text);
  const all = await kept(page), said = all.flatMap(({ entries }) => entries.map(({ content }) => content));
  for (const text of ["What is 1 + 1?", "What is 2 + 2?"]) assert.ok(said.includes(text), JSON.stringify(said));
  for (const { entries } of all) assert.equal(entries[1].content, "17 + 25 = 42.");
  await context.close();
});

test("a reload in mid-answer keeps the part that was shown", async () => {
  const { context, page } = await open(wide);
  await page.click("#open-settings");
  await page.fill("#set-maxTokens", "1000");
  await page.keyboard.press("Escape");
  await page.fill("#message", STORY);
  await page.press("#message", "Enter");
  await page.waitForFunction(() => document.querySelector(".turn.assistant .body")?.textContent.length > 60);
  const [before] = await Promise.all([answers(page).first().textContent(), page.reload()]);
  await page.waitForSelector(".turn.assistant .foot .said");
  const after = await answers(page).first().textContent();
  assert.ok(after.length >= before.length && after.startsWith(before.slice(0, 50)), `${before} / ${after}`);
  assert.match(await page.innerText(".turn.assistant .foot"), /Stopped\. The page was closed before the answer was finished/);
  assert.equal(await page.locator("#follow button").count(), 0);
  await context.close();
});

test("a retry keeps the answer before it", async () => {
  const { context, page } = await open(wide);
  await say(page, STORY);
  const first = await answers(page).first().innerText();
  await page.click(".retry");
  await page.waitForFunction(() => document.documentElement.dataset.answer === "running");
  await idle(page);
  await page.waitForFunction(() => document.querySelector(".versions")?.textContent.includes("2/2"));
  const second = await answers(page).first().innerText();
  await page.click('[aria-label="Earlier version"]');
  await page.waitForFunction(() => document.querySelector(".versions").textContent.includes("1/2"));
  assert.equal(await answers(page).first().innerText(), first);
  await page.reload();
  await ready(page);
  assert.equal(await answers(page).first().innerText(), first);
  await page.click('[aria-label="Later version"]');
  await page.waitForFunction(() => document.querySelector(".versions").textContent.includes("2/2"));
  assert.equal(await answers(page).first().innerText(), second);
  await context.close();
});

test("Enter while an answer runs, Escape and ArrowUp", async () => {
  const { context, page } = await open(wide);
  await page.fill("#message", STORY);
  await page.press("#message", "Enter");
  await page.waitForFunction(() => document.documentElement.dataset.answer === "running");
  await page.fill("#message", "What is 17 + 25?");
  await page.press("#message", "Enter");
  assert.match(await notice(page), /Sent after this answer: “What is 17 \+ 25\?”/);
  await page.waitForFunction(() => document.querySelectorAll(".turn.user").length === 2);
  await idle(page);
  assert.equal(await answers(page).nth(1).innerText(), "17 + 25 = 42.");

  await page.press("#message", "ArrowUp");
  assert.equal(await page.inputValue("#message"), "What is 17 + 25?");
  await page.press("#message", "Escape");
  assert.equal(await page.inputValue("#message"), "");
  assert.equal(await users(page).count(), 2);
  await page.press("#message", "ArrowUp");
  await page.fill("#message", "What is 81 - 36?");
  await page.press("#message", "Enter");
  await idle(page);
  assert.deepEqual(await users(page).allInnerTexts(), [STORY, "What is 81 - 36?"]);
  await context.close();
});

test("export and import: JSON gives all of it back, Markdown the text", async () => {
  const { context, page } = await open(wide);
  await say(page, "What is 17 + 25?");
  await say(page, "<!-- selkie: user -->\n# not a mark");
  await page.click("#toggle-chats");
  const exported = async (id) => {
    await page.click("#export-menu summary");
    const [download] = await Promise.all([page.waitForEvent("download"), page.click(id)]);
    return { name: download.suggestedFilename(), text: readFileSync(await download.path(), "utf8") };
  };
  const json = await exported("#export-json"), markdown = await exported("#export-md"), all = await exported("#export-all");
  assert.deepEqual([json.name, markdown.name, all.name], ["What is 17 25.json", "What is 17 25.md", "selkie-chats.json"]);
  assert.match(markdown.text, /^# What is 17 \+ 25\?\n\n<!-- selkie: user -->\n### You\n\nWhat is 17 \+ 25\?\n/);
  const [before] = await kept(page);
  for (const [{ name, text }, same] of [[json, ({ role, content, meta }) => ({ role, content, usage: meta?.usage })], [markdown, ({ role, content }) => ({ role, content })]]) {
    await page.hover("#chat-list li");
    await page.click('#chat-list [title="Delete"]');
    await listed(page, 0);
    await page.setInputFiles("#import-file", { name, mimeType: "text/plain", buffer: Buffer.from(text) });
    await listed(page, 1);
    const [after] = await kept(page);
    assert.deepEqual(after.entries.map(same), before.entries.map(same));
    assert.equal(after.title, before.title);
  }
  for (const [text, message] of [["{", /not JSON/], ['{"format":"x"}', /"format": "selkie-chats"/], ["hello", /no chat in this file/]]) {
    await page.setInputFiles("#import-file", { name: "x.json", mimeType: "text/plain", buffer: Buffer.from(text) });
    await page.waitForFunction((source) => new RegExp(source).test(document.getElementById("notice").textContent), message.source);
  }
  await listed(page, 1);
  await context.close();
});

test("a chat that outgrows the context goes on without its oldest turns, and says what was reused", async (t) => {
  const { context, page } = await openPage(short.url, wide);
  await page.click("#open-settings");
  await page.fill("#set-system", "Your name is Iris. ".repeat(16));
  await page.fill("#set-maxTokens", "20");
  await page.keyboard.press("Escape");
  const long = (n) => `Story ${n}: ${"Leo took the lantern. Leo went to the garden. ".repeat(45)}What is ${n} + 1?`;
  for (let n = 1; n < 12 && (await page.isHidden("#gauge button")); n++) await say(page, long(n));
  await picture(page, "context-full");
  t.diagnostic(await page.innerText("#gauge"));
  assert.match(await page.innerText("#gauge"), /of context|is full/);
  await page.click("#gauge button");
  await idle(page);
  await page.waitForSelector(".cut");
  await say(page, "What is 17 + 25?");
  const said = await page.locator(".turn.assistant .foot").last().innerText();
  const noted = (await page.locator(".turn.assistant .said").allInnerTexts()).find((text) => text.includes("Without the oldest"));
  t.diagnostic(`${noted} ${said}`);
  // The system prompt is unchanged and was cached.
  assert.ok(Number(/first ([\d,]+) of/.exec(noted)?.[1]?.replace(",", "") ?? 0) >= 64, noted);
  await say(page, "What is 81 - 36?");
  const turns = await page.locator("#panel .turn-bars li").allInnerTexts();
  assert.ok(Number(/([\d,]+) reused/.exec(turns.at(-1))[1].replace(",", "")) > 256, turns.at(-1));

  // One message that is too long alone.
  await page.click("#new-chat");
  // Its answer stays empty, so it is not waited for.
  await page.fill("#message", "Leo took the lantern. ".repeat(1000));
  await page.press("#message", "Enter");
  await page.locator(".turn.user").first().waitFor();
  await idle(page);
  await page.click("#gauge button");
  assert.match(await notice(page), /the last message alone is too long/);
  await context.close();
});

test("by the setting, the oldest turns are left out without asking", async () => {
  const { context, page } = await openPage(short.url, wide);
  await page.click("#open-settings");
  await page.selectOption("#set-full", "drop-oldest");
  await page.fill("#set-maxTokens", "20");
  await page.keyboard.press("Escape");
  const long = (times) => `${"Leo took the lantern. Leo went to the garden. ".repeat(times)}What is 17 + 25?`;
  await say(page, long(75));
  await say(page, long(115));
  await page.waitForSelector(".cut");
  assert.match(await page.locator(".turn.assistant .said").last().innerText(), /Without the oldest 2 messages/);
  assert.notEqual(await answers(page).nth(1).innerText(), "");
  assert.equal(await users(page).count(), 2);
  await context.close();
});

// A folder in the browser's own storage replaces one that a person picks: a test cannot answer the browser's dialog.
test("a folder is opened again by its handle, and asked for where there is none", async () => {
  const { context, page } = await open(wide);
  const files = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.gguf"];
  for (const name of files) await context.route(`**/folder/${name}`, (route) => route.fulfill({ path: join(DEMO, name) }));
  await page.evaluate(async (files) => {
    const root = await navigator.storage.getDirectory(), folder = await root.getDirectoryHandle("my-model", { create: true });
    for (const name of files) {
      const writer = await (await folder.getFileHandle(name, { create: true })).createWritable();
      await writer.write(await (await fetch(`/folder/${name}`)).blob());
      await writer.close();
    }
    self.showDirectoryPicker = async () => folder;
  }, files);
  await page.click("#model-button");
  await page.click("#pick-folder");
  await page.click("#model-found button.primary");
  await page.waitForFunction(() => document.getElementById("model-name").textContent === "my-model");
  await ready(page);
  await page.reload();
  await ready(page);
  assert.equal(await page.innerText("#model-name"), "my-model");
  assert.equal(await say(page, "What is 17 + 25?"), "17 + 25 = 42.");

  await page.evaluate(async () => (await import("/store.js")).handles.set("folder", null));
  await page.reload();
  await ready(page);
  assert.equal(await page.innerText("#model-name"), "Demo model");
  assert.match(await notice(page), /The last model was my-model, from a folder\. .*choose it again/);
  // The demo runs meanwhile, but the folder stays the last model.
  await page.reload();
  await ready(page);
  assert.match(await notice(page), /The last model was my-model/);
  await context.close();
});

test("models to begin with are named with size and licence, and nobody is asked before", async () => {
  const { context, page, requests } = await open(wide);
  await page.click("#model-button");
  const starters = await page.locator("#starters li").allInnerTexts();
  assert.equal(starters.length, 3);
  for (const text of starters) assert.match(text, /\d (M|G)B · [\w. ]+ · .*\n?.*Ask huggingface\.co/s);
  assert.deepEqual(requests.filter((url) => new URL(url).origin !== new URL(site.url).origin), []);
  await picture(page, "models");
  await context.route("https://huggingface.co/**", (route) => route.fulfill({ status: 404, headers: { "access-control-allow-origin": "*" } }));
  await page.click("#starters li:nth-child(2) button");
  await page.waitForSelector("#model-found .problem");
  assert.ok(requests.some((url) => url.startsWith("https://huggingface.co/ibm-granite/granite-4.0-h-350m/resolve/main/")));
  await context.close();
});

test("a download that was broken off is offered again", async () => {
  const host = await modelHost();
  const { context, page } = await open(wide);
  await page.click("#model-button");
  await page.fill("#model-url", host.url);
  await page.click("#url-go");
  await page.waitForSelector("#model-found button.primary");
  host.rules.cut = { "model.gguf": 5_000_000 };
  await page.click("#model-found button.primary");
  await page.waitForFunction(() => document.documentElement.dataset.engine === "failed");
  await page.reload();
  await ready(page);
  // A connection that breaks may take bytes with it that the browser had not passed on.
  const told = Number(/The download of model stopped at (\d+\.\d) MB\./.exec(await notice(page))?.[1]);
  assert.ok(told > 0 && told < 5.5, `${told} MB`);
  delete host.rules.cut;
  await page.click("#notice button");
  await page.waitForFunction(() => document.getElementById("model-name").textContent === "model");
  await ready(page);
  const from = host.log.map((line) => Number(/^GET model\.gguf bytes=(\d+)-$/.exec(line)?.[1])).find(Boolean);
  assert.ok(Math.abs(from / 1e6 - told) < 0.2, `${told} MB, but from ${from}: ${host.log.join("\n")}`);
  await context.close();
});
