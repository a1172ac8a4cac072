//! Everything at once, for a while: random requests, malformed ones, clients that leave or read slowly, pools that are too
//! small, three keys. `SELKIE_SOAK_SECONDS=180` is the form of CI, 3600 that of a release, `SELKIE_SOAK_SEED` another course.
//! `SELKIE_SOAK_PAUSE_MS` makes each of the 8 clients wait after a request, for a machine that has other work.

use std::{
    env,
    io::Read,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    binary::*,
    client::{Answer, Server},
};

const KEYS: [&str; 3] = ["key-of-the-first-team", "key-of-the-second-team", "key-of-the-third-team"];

/// A generator of numbers (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }
}

fn number(name: &str, default: u64) -> u64 {
    env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Prompts of a chat of many lengths, some of them with a common beginning.
fn prompts() -> Vec<Value> {
    let codes = "The code of the red box is 4812. The code of the blue box is 1937. ";
    let systems = [String::new(), codes.into(), codes.repeat(6), codes.repeat(20)];
    let questions = ["What is 17 + 25?", "What is the code of the red box?", "Tell me a story about a fox.", "Hello!"];
    let with = |system: &String| {
        let system = json!({ "role": "system", "content": system });
        questions.map(|question| json!([system, { "role": "user", "content": question }]))
    };
    systems.iter().flat_map(with).collect()
}

fn chat(messages: &Value, stream: bool) -> Value {
    json!({ "messages": messages, "temperature": 0, "max_tokens": 24, "stream": stream })
}

fn post(server: &Server, key: usize, body: &Value) -> Answer {
    let head = format!("Authorization: Bearer {}\r\n", KEYS[key]);
    server.post_with("/v1/chat/completions", &head, &body.to_string())
}

struct Worker<'a> {
    server: &'a Server,
    prompts: &'a [Value],
    answers: &'a [String],
    random: Random,
    checked: &'a AtomicUsize,
}

impl Worker<'_> {
    fn act(&mut self) {
        let (key, i) = (self.random.next(3) as usize, self.random.next(self.prompts.len() as u64) as usize);
        match self.random.next(10) {
            0 => self.malformed(key),
            1 => self.leaves(key, i),
            2 => self.is_private(key),
            way => {
                let stream = way > 5;
                let answer = post(self.server, key, &chat(&self.prompts[i], stream));
                if answer.status == 429 {
                    assert!(answer.header("retry-after").is_some());
                    return;
                }
                assert_eq!(answer.status, 200, "{}", answer.text());
                let text = if stream {
                    let pieces = answer.events(true);
                    pieces.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect()
                } else {
                    answer.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
                };
                assert_eq!(text, self.answers[i], "prompt {i}, stream {stream}");
                self.checked.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn malformed(&mut self, key: usize) {
        let body = chat(&self.prompts[0], false).to_string();
        let cut = self.random.next(body.len() as u64) as usize;
        let answer =
            self.server.post_with("/v1/chat/completions", &format!("x-api-key: {}\r\n", KEYS[key]), &body[..cut]);
        assert_eq!(answer.status, 400, "{}", &body[..cut]);
        assert_eq!(self.server.post_with("/v1/chat/completions", "x-api-key: nobody\r\n", &body).status, 401);
    }

    /// Reads a little, late, and leaves.
    fn leaves(&mut self, key: usize, i: usize) {
        let mut body = chat(&self.prompts[i], self.random.next(2) == 0);
        body["max_tokens"] = 400.into();
        body["ignore_eos"] = true.into();
        let head = format!("x-api-key: {}\r\n", KEYS[key]);
        let mut stream = self.server.open("/v1/chat/completions", &head, &body.to_string());
        thread::sleep(Duration::from_millis(self.random.next(150)));
        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let _ = stream.read(&mut [0; 50]);
    }

    /// A prompt that nobody has sent is computed, for each key.
    fn is_private(&mut self, key: usize) {
        let secret: String = (0..60).map(|_| format!("The number is {}. ", self.random.next(1000))).collect();
        let body = chat(&json!([{ "role": "user", "content": secret }]), false);
        for other in [key, (key + 1) % 3] {
            let answer = post(self.server, other, &body);
            if answer.status == 429 {
                return;
            }
            assert_eq!(answer.json()["selkie"]["reused_tokens"], 0, "{}", answer.text());
        }
    }
}

/// Resident memory of the server in KiB.
#[cfg(target_os = "linux")]
pub fn memory(server: &Server) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).ok()?;
    status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?.trim().strip_suffix(" kB")?.parse().ok()
}

#[cfg(not(target_os = "linux"))]
fn memory(_: &Server) -> Option<u64> {
    None
}

#[test]
fn everything_at_once() {
    let (seconds, seed) = (number("SELKIE_SOAK_SECONDS", 8), number("SELKIE_SOAK_SEED", 1));
    let pause = Duration::from_millis(number("SELKIE_SOAK_PAUSE_MS", 0));
    let prompts = prompts();
    let answers: Vec<String> = {
        let calm = Server::start(&["--no-prefix-cache"]);
        let answer = |messages| calm.post("/v1/chat/completions", &chat(messages, false)).json();
        prompts.iter().map(|p| answer(p)["choices"][0]["message"]["content"].as_str().unwrap().to_owned()).collect()
    };
    let dir = TempDir::new("serve_soak");
    let keys = json!({ KEYS[0]: "first", KEYS[1]: "second", KEYS[2]: "third" });
    let file = dir.write("keys.json", keys.to_string());
    let pools = ["--slots", "4", "--kv-pages", "24", "--max-batch", "3", "--max-queue", "3", "--context", "1024"];
    let server = Server::start(&[&["--keys", &file][..], &pools].concat());
    let (checked, end) = (AtomicUsize::new(0), Instant::now() + Duration::from_secs(seconds));
    let half = thread::scope(|scope| {
        for worker in 0..8 {
            let (server, prompts, answers, checked) = (&server, &prompts[..], &answers[..], &checked);
            let mut worker = Worker { server, prompts, answers, random: Random(seed * 1000 + worker), checked };
            scope.spawn(move || {
                while Instant::now() < end {
                    worker.act();
                    thread::sleep(pause);
                }
            });
        }
        thread::sleep(Duration::from_secs(seconds) / 2);
        memory(&server)
    });
    let metric = |name: &str| server.metric(name, "");
    server.until("nothing runs", || metric("vllm:num_requests_running") + metric("vllm:num_requests_waiting") == 0.0);
    let checked = checked.into_inner();
    assert!(checked as u64 > seconds, "only {checked} answers were compared");
    if let (Some(half), Some(now)) = (half, memory(&server)) {
        println!("{checked} answers compared in {seconds} s; memory at half time {half} KiB, at the end {now} KiB");
        // 5 %, and what an allocator keeps of a peak.
        assert!(now < half + half / 20 + 16_384, "memory grew from {half} to {now} KiB; seed {seed}");
    }
    for (prompt, wanted) in prompts.iter().zip(&answers) {
        assert_eq!(post(&server, 0, &chat(prompt, false)).json()["choices"][0]["message"]["content"], **wanted);
    }
}
