// The disk tier: states and pages in the origin's private file system, across eviction, reloads, tabs, damage and the settings.

import assert from "node:assert/strict";
import { test } from "node:test";
import { blank, openPage, profile, ready, say, serve } from "./harness.mjs";

const site = await serve();
const STORY = "Tell me a story about a fox named Leo and a lantern.";

// A page of the API with helpers: `load` with a disk, `ask` for an answer and its usage, `files` of the disk by size.
async function prepared(context) {
  const page = await blank(context, site.url);
  page.setDefaultTimeout(120_000);
  await page.evaluate(() => {
    const folder = async () => (await navigator.storage.getDirectory()).getDirectoryHandle("selkie-states");
    globalThis.load = (more) => selkie.load({ model: { url: "/models/demo/" }, backend: "cpu", diskCacheMiB: 64, ...more });
    globalThis.prompt = (seed) => Array.from({ length: 32 }, (_, i) => `${seed} times ${i} is ${seed * i}.`).join(" ");
    globalThis.ask = async (engine, seed) => {
      const { text, usage } = await engine.generate({ prompt: prompt(seed), maxTokens: 12, temperature: 0 }).done;
      return { text, ...usage };
    };
    globalThis.files = async () => {
      const found = {};
      try {
        for await (const [name, file] of (await folder()).entries()) found[name] = (await file.getFile()).size;
      } catch (e) {
        if (e.name !== "NotFoundError") throw e;
      }
      return found;
    };
    // Changes a bit in every so many bytes of all states and pages.
    globalThis.damage = async (step) => {
      for await (const [name, file] of (await folder()).entries()) {
        if (name.endsWith(".json")) continue;
        const bytes = new Uint8Array(await (await file.getFile()).arrayBuffer());
        for (let i = 0; i < bytes.length; i += step) bytes[i] ^= 1;
        const out = await file.createWritable();
        await out.write(bytes);
        await out.close();
      }
    };
    // What the disk has when nothing runs any more and all of it is written.
    globalThis.settled = async (engine) => {
      for (let before = -1; ; ) {
        const { disk } = await engine.stats();
        if (disk.bytes === before) return disk;
        before = disk.bytes;
        await new Promise((done) => setTimeout(done, 300));
      }
    };
  });
  return page;
}

test("what was evicted comes back, also after a reload, with the same text", async (t) => {
  const { context, errors } = await profile({ webgpu: false });
  const first = await prepared(context);
  const before = await first.evaluate(async () => {
    // Room for little more than one of these prompts.
    const engine = await load({ memoryMiB: 7, contextTokens: 640, maxBatch: 1 });
    const answers = [];
    for (const seed of [1, 2, 3, 1, 2]) answers.push(await ask(engine, seed));
    return { info: engine.info, answers, disk: await settled(engine) };
  });
  assert.deepEqual([before.info.diskCache, before.info.diskCacheProblem], [true, null]);
  const [one, two, three, again] = before.answers;
  t.diagnostic(JSON.stringify({ again, disk: before.disk, slots: before.info.slots, pages: before.info.pages }));
  assert.deepEqual([one, two, three].map(({ reused }) => reused), [0, 0, 0]);
  assert.ok(again.diskTokens >= 256 && again.reused === again.diskTokens, JSON.stringify(again));
  assert.equal(again.text, one.text);
  assert.ok(before.disk.values > 10 && before.disk.bytes > 1e6, JSON.stringify(before.disk));

  // The page is closed without a word.
  await first.reload();
  await first.close();
  const second = await prepared(context);
  const after = await second.evaluate(async () => {
    const engine = await load();
    const at = performance.now();
    const kept = await ask(engine, 1);
    const ms = performance.now() - at;
    const rest = [await ask(engine, 2), await ask(engine, 3)];
    const fresh = await ask(engine, 4);
    engine.close();
    // Without a disk, everything is computed.
    const none = await load({ diskCacheMiB: 0 });
    const alone = await ask(none, 1);
    return { kept, ms, rest, fresh, alone, info: none.info };
  });
  t.diagnostic(`${after.kept.diskTokens} of ${after.kept.promptTokens} tokens from the disk, answered in ${Math.round(after.ms)} ms`);
  assert.ok(after.kept.diskTokens >= 256, JSON.stringify(after.kept));
  assert.deepEqual([after.kept.text, ...after.rest.map(({ text }) => text)], [one, two, three].map(({ text }) => text));
  // What the device still held was written while nothing ran.
  assert.ok(after.rest.every(({ diskTokens }) => diskTokens >= 256), JSON.stringify(after.rest));
  assert.equal(after.fresh.diskTokens, 0);
  assert.deepEqual([after.alone.diskTokens, after.alone.reused, after.alone.text], [0, 0, one.text]);
  assert.deepEqual([after.info.diskCache, after.info.diskCacheProblem], [false, null]);
  assert.deepEqual(errors, []);
  await context.close();
});

test("on WebGPU too, and what the CPU computed is not that", async (t) => {
  const { context, errors } = await profile({ webgpu: true });
  const page = await prepared(context);
  const ask = (backend, seed) => page.evaluate(async ({ backend, seed }) => {
    const engine = await load({ backend });
    const answer = await globalThis.ask(engine, seed);
    await settled(engine);
    engine.close();
    return answer;
  }, { backend, seed });
  const cpu = await ask("cpu", 1), first = await ask("wgpu", 1), again = await ask("wgpu", 1);
  t.diagnostic(JSON.stringify([cpu, first, again]));
  assert.deepEqual([cpu.reused, first.reused], [0, 0]);
  assert.ok(again.diskTokens >= 256, JSON.stringify(again));
  assert.deepEqual([first.text, again.text], [cpu.text, cpu.text]);
  assert.deepEqual(errors, []);
  await context.close();
});

test("damaged files are never used, and what is cut is absent", async () => {
  const { context, errors } = await profile({ webgpu: false });
  const page = await prepared(context);
  const result = await page.evaluate(async () => {
    const texts = [], loaded = [];
    for (const harm of [null, () => damage(1000), () => damage(7), null]) {
      await harm?.();
      const engine = await load();
      for (const seed of [1, 2]) {
        const { text, diskTokens } = await ask(engine, seed);
        texts.push(text);
        loaded.push(diskTokens);
      }
      await settled(engine);
      engine.close();
    }
    return { texts, loaded };
  });
  assert.equal(new Set(result.texts).size, new Set(result.texts.slice(0, 2)).size, JSON.stringify(result.texts));
  assert.deepEqual(result.loaded.slice(0, 6), [0, 0, 0, 0, 0, 0]);
  assert.ok(result.loaded[6] >= 256, "what was computed again is kept again");
  assert.deepEqual(errors, []);
  await context.close();
});

test("an engine that ends while it writes leaves whole values only", async () => {
  const { context, errors } = await profile({ webgpu: false });
  const page = await prepared(context);
  const result = await page.evaluate(async () => {
    const expected = [];
    const none = await load({ diskCacheMiB: 0 });
    for (const seed of [1, 2, 3]) expected.push((await ask(none, seed)).text);
    none.close();
    let loaded = 0;
    for (let round = 0; round < 9; round++) {
      const engine = await load({ memoryMiB: 7, contextTokens: 640, maxBatch: 1 });
      const seed = 1 + (round % 3), found = await ask(engine, seed);
      if (found.text !== expected[seed - 1]) return { round, found, expected };
      loaded += found.diskTokens;
      // It is writing what it holds.
      await new Promise((done) => setTimeout(done, 20 * round));
      engine.close();
    }
    return { loaded };
  });
  assert.ok(result.loaded > 0, JSON.stringify(result));
  assert.deepEqual(errors, []);
  await context.close();
});

test("of two tabs one keeps states, and the other goes on without", async () => {
  const { context, errors } = await profile({ webgpu: false });
  const [one, two] = [await prepared(context), await prepared(context)];
  assert.equal(await one.evaluate(async () => (globalThis.engine = await load()).info.diskCache), true);
  const second = await two.evaluate(async () => {
    const engine = (globalThis.engine = await load());
    const answer = await ask(engine, 1);
    const refused = await failure(engine.forgetStates());
    return { info: engine.info, answer, refused };
  });
  assert.equal(second.info.diskCache, false);
  assert.match(second.info.diskCacheProblem, /^Another tab keeps the states/);
  assert.deepEqual([second.answer.diskTokens], [0]);
  assert.deepEqual([second.refused.code, /Another tab/.test(second.refused.message)], ["storage", true]);
  await one.close();
  const third = await two.evaluate(async () => {
    engine.close();
    const again = await load();
    await ask(again, 1);
    const disk = await settled(again);
    // A model that is not stored has none.
    const picked = [];
    for (const name of ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.gguf"]) {
      picked.push(new File([await (await fetch(`/models/demo/${name}`)).blob()], name));
    }
    const other = await load({ model: { files: picked } });
    return { on: again.info.diskCache, disk, problem: other.info.diskCacheProblem };
  });
  assert.ok(third.on && third.disk.values > 0, JSON.stringify(third));
  assert.match(third.problem, /models that the browser stores/);
  assert.deepEqual(errors, []);
  await context.close();
});

test("a small quota is kept, and everything can be deleted", async () => {
  const { context, errors } = await profile({ webgpu: false });
  const page = await prepared(context);
  const result = await page.evaluate(async () => {
    const engine = await load({ diskCacheMiB: 8, memoryMiB: 7, contextTokens: 640, maxBatch: 1 });
    for (let seed = 1; seed < 7; seed++) await ask(engine, seed);
    const full = await settled(engine), taken = await files();
    await engine.clearCache();
    const cleared = await files();
    await ask(engine, 1);
    const anew = await settled(engine);
    await engine.forgetStates({ stop: true });
    const gone = await files();
    const after = await ask(engine, 1), stopped = await settled(engine);
    return { full, taken, cleared, anew, gone, after, stopped, still: await files() };
  });
  const bytes = (files) => Object.entries(files).reduce((sum, [name, size]) => sum + (name.endsWith(".json") ? 0 : size), 0);
  assert.ok(result.full.values > 3 && result.full.bytes <= 8 * 2 ** 20, JSON.stringify(result.full));
  assert.ok(bytes(result.taken) <= 16 * 2 ** 20 && bytes(result.taken) >= result.full.bytes, JSON.stringify(result.taken));
  assert.equal(bytes(result.cleared), 0, "nothing of the conversations remains");
  assert.ok(result.anew.values > 0);
  assert.deepEqual([result.gone, result.still], [{}, {}]);
  assert.deepEqual([result.after.reused, result.stopped.values], [0, 0]);
  assert.deepEqual(errors, []);
  await context.close();
});

test("the page: a chat goes on after a reload without being read again, until the setting is turned off", async (t) => {
  const { context, page, errors } = await openPage(site.url, { viewport: { width: 1280, height: 860 } });
  const facts = () => page.locator(".turn.assistant .facts").last().innerText();
  await say(page, STORY);
  await page.waitForTimeout(500);
  await page.reload();
  await ready(page);
  await page.locator(".turn.assistant .body").first().waitFor();
  await say(page, "What is 17 + 25?");
  const said = await facts();
  t.diagnostic(said);
  const [, reused] = /([\d,]+) of ([\d,]+) prompt tokens reused/.exec(said);
  assert.ok(Number(reused) >= 64, said);
  assert.match(await page.locator(".turn-bars li").last().innerText(), /tokens were loaded from the browser's storage/);
  await page.click("#open-settings");
  await page.uncheck("#set-states");
  await page.waitForFunction(() => document.getElementById("states-hint").textContent === "Nothing is kept now.");
  await page.click("#settings-form .primary");
  await page.reload();
  await ready(page);
  await page.locator(".turn.assistant .body").nth(1).waitFor();
  await say(page, "And 3 more?");
  assert.doesNotMatch(await page.locator(".turn-bars li").last().innerText(), /tokens were loaded from/);
  assert.deepEqual(errors, []);
  await context.close();
});
