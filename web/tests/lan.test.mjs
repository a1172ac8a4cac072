// The page on an address of a local network, where a browser allows a page less than on localhost. Server and browser run in
// a network namespace of their own that has the address; where none can be made, they take the machine's own address.

import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { chmodSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { networkInterfaces, tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { test } from "node:test";
import { CHROMIUM, DEMO, DIST, FLAGS, SELKIE, atEnd, chromium } from "./harness.mjs";

// Reserved for documentation, so no host has it.
const ADDRESS = "192.0.2.1";

// The address, and a wrapper that runs a program in a namespace with it; null if that is not allowed.
async function namespace() {
  const unshare = ["unshare", ...(process.getuid() === 0 ? ["-n"] : ["-r", "-n"])];
  if (spawnSync(unshare[0], [...unshare.slice(1), "true"]).status !== 0) return null;
  const setup = `ip link set lo up && ip addr add ${ADDRESS}/32 dev lo && echo ready && exec sleep infinity`;
  const holder = spawn(unshare[0], [...unshare.slice(1), "sh", "-c", setup], { stdio: ["ignore", "pipe", "inherit"] });
  atEnd(() => holder.kill("SIGKILL"));
  const ready = await new Promise((resolve) => {
    createInterface(holder.stdout).once("line", () => resolve(true));
    holder.once("exit", () => resolve(false));
  });
  if (!ready) return null;
  const dir = mkdtempSync(join(tmpdir(), "selkie-lan-"));
  atEnd(() => rmSync(dir, { recursive: true, force: true }));
  const user = process.getuid() === 0 ? "" : "-U --preserve-credentials";
  const within = (program) => {
    const path = join(dir, program.split("/").at(-1));
    writeFileSync(path, `#!/bin/sh\nexec nsenter -t ${holder.pid} ${user} -n "${program}" "$@"\n`);
    chmodSync(path, 0o755);
    return path;
  };
  return { address: ADDRESS, within };
}

function ownAddress() {
  const found = Object.values(networkInterfaces()).flat().find(({ family, internal }) => family === "IPv4" && !internal);
  return found ? { address: found.address, within: (program) => program } : null;
}

test("a LAN address: the page says what is missing, answers on the CPU and loads a folder", async (t) => {
  const place = (await namespace()) ?? ownAddress();
  assert.ok(place, "there is no address but localhost here, and no network namespace can be made");
  const { address, within } = place;
  t.diagnostic(`at ${address}`);
  const server = spawn(within(SELKIE), ["web", "--listen", "0.0.0.0", "--port", "0", "--dir", DIST], { stdio: ["ignore", "pipe", "inherit"] });
  atEnd(() => server.kill("SIGKILL"));
  const line = await new Promise((resolve) => createInterface(server.stdout).once("line", resolve));
  const browser = await chromium.launch({ executablePath: within(CHROMIUM), args: [...FLAGS, "--enable-unsafe-webgpu"] });
  atEnd(() => browser.close());
  const context = await browser.newContext();
  const page = await context.newPage();
  const errors = [];
  page.on("pageerror", (error) => errors.push(String(error)));
  page.setDefaultTimeout(120_000);
  const ready = () => page.waitForFunction(() => document.documentElement.dataset.engine === "ready");
  const say = async () => {
    await page.fill("#message", "What is 17 + 25?");
    await page.press("#message", "Enter");
    await page.waitForFunction(() => [...document.querySelectorAll(".turn.assistant")].at(-1)?.textContent.includes("17 + 25 = 42."));
    await page.waitForFunction(() => document.documentElement.dataset.answer !== "running");
  };

  await page.goto(`http://${address}:${new URL(line).port}/`);
  assert.equal(await page.evaluate(() => isSecureContext || "randomUUID" in crypto), false);
  await ready();
  await say();
  assert.equal(await page.innerText("#model-badge"), "CPU");
  assert.match(await page.innerText("#foot"), /http.*no WebGPU.*not kept/s);

  await page.click("#model-button");
  await page.setInputFiles("#folder", DEMO);
  await page.click("#model-found button.primary");
  await page.waitForFunction(() => document.getElementById("model-name").textContent === "demo");
  await ready();
  await say();
  await page.reload();
  await ready();
  await say();
  assert.deepEqual(errors, []);
});
