// The page with the model of `selkie serve`.

import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { answers, atEnd, modelServer, openPage, picture, ready, say } from "./harness.mjs";

const STORY = "Tell me a story about a fox named Leo and a lantern.";

test("the server's model answers, and the panel shows what it reused", async (t) => {
  const server = await modelServer();
  const { context, page, errors, requests } = await openPage(server.url, { viewport: { width: 1280, height: 860 } });
  assert.match(page.url(), /\?server$/);
  assert.equal(await page.innerText("#model-name"), "demo");
  assert.match(await page.innerText("#foot"), /what you type goes to this server/);
  assert.equal(await say(page, "What is 17 + 25?"), "17 + 25 = 42.");
  await say(page, STORY);
  await say(page, "Who has the lantern?");
  await page.waitForSelector("#panel .turn-bars li:nth-child(3)");
  const third = (await page.locator("#panel .turn-bars li").allInnerTexts())[2];
  assert.ok(Number(/([\d,]+) reused/.exec(third)[1]) >= 64, third);
  await page.waitForSelector("#panel .tree svg circle");
  assert.equal(await page.locator("#panel button", { hasText: "Clear the cache" }).count(), 0);
  assert.deepEqual(requests.filter((url) => /\.(safetensors|gguf)$/.test(url)), [], "no weights are downloaded");
  t.diagnostic(third.replaceAll("\n", " "));
  await picture(page, "server");

  // Without reuse, and then in the page itself, the answers are the same.
  const said = await answers(page).allInnerTexts();
  await page.click("#open-settings");
  await page.uncheck("#set-cache");
  await page.press("#set-system", "Escape");
  await page.click("#new-chat");
  for (const [i, text] of ["What is 17 + 25?", STORY, "Who has the lantern?"].entries()) assert.equal(await say(page, text), said[i]);
  assert.match((await page.locator("#panel .turn-bars li").allInnerTexts())[2], /(^|\D)0 reused/);
  await page.click("#model-button");
  await page.click("text=The demo model, in this page");
  await ready(page);
  assert.match(await page.innerText("#foot"), /Nothing you type leaves your device|Runs on/);
  assert.equal(await say(page, "What is 17 + 25?"), said[0]);
  assert.deepEqual(errors, []);
  await context.close();
});

test("a stop, and a server that is gone", async () => {
  const server = await modelServer();
  const { context, page } = await openPage(server.url);
  // Only a stop ends this answer: 4,000 tokens last for seconds on any machine.
  await page.route("**/v1/chat/completions", (route) => {
    const endless = { ...route.request().postDataJSON(), ignore_eos: true, max_tokens: 4000 };
    return route.continue({ postData: JSON.stringify(endless) });
  });
  await page.fill("#message", STORY);
  await page.press("#message", "Enter");
  await page.waitForFunction(() => document.querySelector(".turn.assistant .body")?.textContent.length > 40);
  await page.click("#send");
  await page.waitForFunction(() => document.documentElement.dataset.answer === "none");
  assert.match(await page.innerText(".turn.assistant .foot"), /Stopped/);
  await page.unroute("**/v1/chat/completions");
  server.stop();
  await page.fill("#message", "What is 17 + 25?");
  await page.press("#message", "Enter");
  await page.waitForSelector(".turn.assistant .problem");
  assert.match(await page.innerText(".turn.assistant .problem"), /The server does not answer/);
  await context.close();
});

test("a server with keys asks for one, and draws the caller's part of the cache only", async () => {
  const dir = mkdtempSync(join(tmpdir(), "selkie-page-"));
  atEnd(() => rmSync(dir, { recursive: true }));
  const keys = join(dir, "keys.json"), [mine, other] = ["a-key-of-mine-0123", "a-key-of-others-0123"];
  writeFileSync(keys, JSON.stringify({ [mine]: "mine", [other]: "others" }));
  const server = await modelServer("--keys", keys);
  const { context, page } = await openPage(server.url, { viewport: { width: 1280, height: 860 }, wait: false });
  const enter = async (key) => {
    await page.fill("#load input[type=password]", key);
    await page.click("text=Use this key");
  };
  await page.waitForSelector("#load input[type=password]");
  await enter("a-wrong-key-0123456");
  await page.waitForSelector("#load input[type=password]");
  await enter(mine);
  await ready(page);
  const long = { model: "demo", messages: [{ role: "user", content: STORY }], max_tokens: 64, temperature: 0 };
  const headers = (key) => ({ authorization: `Bearer ${key}`, "content-type": "application/json" });
  await fetch(new URL("v1/chat/completions", server.url), { method: "POST", headers: headers(other), body: JSON.stringify(long) });
  const nodes = async (key) => (await (await fetch(new URL("engine", server.url), { headers: headers(key) })).json()).stats.tree.length;
  assert.ok((await nodes(other)) > 0);
  assert.equal(await nodes(mine), 0);
  assert.equal(await say(page, "What is 17 + 25?"), "17 + 25 = 42.");
  assert.equal((await fetch(new URL("engine", server.url))).status, 401);
  await context.close();
});
