//! Rules over logits, and log probabilities.

use serde_json::{Value, json};

use crate::client::Server;

fn complete(server: &Server, more: Value) -> Value {
    let mut body = json!({ "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "return_token_ids": true });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let answer = server.post("/v1/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["choices"][0].clone()
}

#[test]
fn rules_are_obeyed() {
    let server = Server::start(&[]);
    let plain = complete(&server, json!({}));
    let first = plain["token_ids"][0].as_u64().unwrap();
    let forbidden = complete(&server, json!({ "logit_bias": { first.to_string(): -100 } }));
    assert!(!forbidden["token_ids"].as_array().unwrap().contains(&first.into()), "{forbidden}");
    let one = complete(&server, json!({ "allowed_token_ids": [first], "max_tokens": 5 }));
    assert_eq!(one["token_ids"], json!([first, first, first, first, first]));
    let penalised = complete(
        &server,
        json!({ "allowed_token_ids": [first, first + 1], "frequency_penalty": 2.0, "presence_penalty": 2.0,
        "max_tokens": 40 }),
    );
    assert!(penalised["token_ids"].as_array().unwrap().contains(&(first + 1).into()), "{penalised}");
    let stopped = complete(&server, json!({ "stop_token_ids": [first] }));
    assert_eq!((&stopped["token_ids"], &stopped["finish_reason"]), (&json!([first]), &json!("stop")));
    let chat = |least: u32| {
        let messages = json!([{ "role": "user", "content": "What is 17 + 25?" }]);
        let body = json!({ "messages": messages, "min_tokens": least, "max_tokens": 30, "temperature": 0 });
        server.post("/v1/chat/completions", &body).json()["usage"]["completion_tokens"].as_u64().unwrap()
    };
    assert!(chat(0) == 12 && chat(20) >= 20);
    let refused = server.post("/v1/completions", &json!({ "prompt": "x", "allowed_token_ids": [99_999_999] }));
    assert_eq!(refused.status, 400, "{}", refused.text());
}

/// What a stream says of the prompt comes with the first token, and is what a whole answer says.
#[test]
fn prompts_are_scored_in_pieces() {
    let server = Server::start(&[]);
    let body = |stream: bool| {
        json!({ "prompt": ["Once upon a time", "The fox"], "n": 2, "seed": 7, "max_tokens": 5, "logprobs": 2, "echo": true,
            "prompt_logprobs": 1, "stream": stream })
    };
    let whole = server.post("/v1/completions", &body(false)).json();
    let events = server.post("/v1/completions", &body(true)).events(true);
    for (i, whole) in whole["choices"].as_array().unwrap().iter().enumerate() {
        let pieces: Vec<&Value> = events.iter().map(|e| &e["choices"][0]).filter(|c| c["index"] == i).collect();
        let text: String = pieces.iter().filter_map(|c| c["text"].as_str()).collect();
        assert_eq!(whole["text"], text);
        assert!(pieces[0]["text"].as_str().unwrap().starts_with(if i < 2 { "Once upon a time" } else { "The fox" }));
        for field in ["tokens", "token_logprobs", "text_offset", "top_logprobs"] {
            let parts = pieces.iter().filter_map(|c| c["logprobs"][field].as_array()).flatten();
            assert_eq!(whole["logprobs"][field], Value::from(parts.cloned().collect::<Vec<Value>>()), "{field} of {i}");
        }
        assert_eq!(pieces[0]["prompt_logprobs"], whole["prompt_logprobs"]);
        assert!(pieces[1..].iter().all(|c| c.get("prompt_logprobs").is_none()));
    }
    // An echo alone.
    let plain = json!({ "prompt": "The fox", "max_tokens": 3, "echo": true, "stream": true, "return_token_ids": true });
    let events = server.post("/v1/completions", &plain).events(true);
    assert!(events[0]["choices"][0]["text"].as_str().unwrap().starts_with("The fox"), "{}", events[0]);
    let ids = events.iter().filter_map(|e| e["choices"][0]["token_ids"].as_array()).flatten().count();
    assert!(ids == 3 && events[0]["choices"][0].get("prompt_logprobs").is_none());
}

#[test]
fn prompts_of_chats_are_scored() {
    let server = Server::start(&[]);
    let messages = json!([{ "role": "user", "content": "What is 17 + 25?" }]);
    let ids = server.post("/v1/chat/completions/render", &json!({ "messages": messages })).json()["token_ids"].clone();
    let same = server.post("/v1/completions", &json!({ "prompt": ids, "prompt_logprobs": 2, "max_tokens": 1 })).json();
    let body = |stream: bool| json!({ "messages": messages, "prompt_logprobs": 2, "n": 2, "temperature": 0, "stream": stream });
    let whole = server.post("/v1/chat/completions", &body(false)).json();
    assert_eq!(whole["prompt_logprobs"].as_array().unwrap().len(), ids.as_array().unwrap().len());
    assert_eq!(whole["prompt_logprobs"], same["choices"][0]["prompt_logprobs"]);
    assert_eq!(whole["choices"][1]["message"]["content"], "17 + 25 = 42.");
    assert!(whole["choices"][0].get("prompt_logprobs").is_none() && whole["choices"][0]["logprobs"].is_null());
    let events = server.post("/v1/chat/completions", &body(true)).events(true);
    let lists: Vec<&Value> = events.iter().filter_map(|e| e.get("prompt_logprobs")).collect();
    assert_eq!(lists, [&whole["prompt_logprobs"]; 2], "one for each choice");
    let refused = server.post("/v1/chat/completions", &json!({ "messages": messages, "prompt_logprobs": 21 }));
    assert_eq!((refused.status, refused.param().as_deref()), (400, Some("prompt_logprobs")));
}

/// A prompt that is echoed has the log probabilities that the same tokens have when they are generated.
#[test]
fn prompts_are_scored() {
    let server = Server::start(&["--max-batch", "4"]);
    let ask = |more: Value| {
        let mut body = json!({ "prompt": "Once upon a time", "max_tokens": 150, "temperature": 0, "logprobs": 2, "ignore_eos": true });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/completions", &body)
    };
    let made = ask(json!({ "return_token_ids": true })).json();
    let made = &made["choices"][0];
    let start = server.post("/tokenize", &json!({ "prompt": "Once upon a time" })).json()["tokens"].clone();
    let ids: Vec<Value> = [&start, &made["token_ids"]].iter().flat_map(|ids| ids.as_array().unwrap().clone()).collect();
    let n = start.as_array().unwrap().len();
    // All of it as a prompt, while others run.
    let busy = server.open("/v1/completions", "", crate::ENDLESS);
    for _ in 0..2 {
        let echoed = ask(json!({ "prompt": ids, "max_tokens": 1, "echo": true, "prompt_logprobs": 1 })).json();
        let choice = &echoed["choices"][0];
        assert_eq!(
            (&echoed["selkie"]["reason"], &echoed["selkie"]["reused_tokens"]),
            (&json!("prompt_logprobs"), &json!(0))
        );
        assert_eq!(echoed["usage"]["prompt_tokens"], ids.len());
        assert!(choice["text"].as_str().unwrap().starts_with("Once upon a time"), "{choice}");
        for name in ["token_logprobs", "top_logprobs", "tokens"] {
            let (made, all) =
                (made["logprobs"][name].as_array().unwrap(), choice["logprobs"][name].as_array().unwrap());
            assert_eq!((all.len(), &all[n..ids.len()]), (ids.len() + 1, &made[..]), "{name}");
        }
        assert_eq!(choice["logprobs"]["token_logprobs"][0], Value::Null);
        let own = choice["prompt_logprobs"].as_array().unwrap();
        assert_eq!((own.len(), &own[0]), (ids.len(), &Value::Null));
        let third = &own[n + 2][ids[n + 2].to_string()];
        assert_eq!(third["logprob"], made["logprobs"]["token_logprobs"][2], "{own:?}");
        assert_eq!((&third["rank"], &third["decoded_token"]), (&json!(1), &made["logprobs"]["tokens"][2]));
    }
    drop(busy);
    // An echo alone reuses what there is.
    let plain = ask(json!({ "prompt": ids, "max_tokens": 1, "echo": true, "logprobs": null })).json();
    assert!(plain["selkie"]["reused_tokens"].as_u64().unwrap() >= 64, "{plain}");
    assert!(plain["choices"][0].get("prompt_logprobs").is_none() && plain["choices"][0]["logprobs"].is_null());
    for (more, param) in [(json!({ "echo": 1 }), "echo"), (json!({ "prompt_logprobs": 21 }), "prompt_logprobs")] {
        let refused = ask(more.clone());
        assert_eq!((refused.status, refused.param().as_deref()), (400, Some(param)), "{more}");
    }
    assert_eq!(server.metric("selkie:prefix_cache_requests_total", "\"prompt_logprobs\""), 2.0);
}

#[test]
fn log_probabilities_whole_and_in_pieces() {
    let server = Server::start(&[]);
    let messages = json!([{ "role": "user", "content": "What is 17 + 25?" }]);
    let body = |stream: bool| json!({ "messages": messages, "temperature": 0, "logprobs": true, "top_logprobs": 3, "stream": stream });
    let whole = server.post("/v1/chat/completions", &body(false)).json();
    let content = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len() as u64, whole["usage"]["completion_tokens"].as_u64().unwrap());
    for entry in content {
        let (top, own) = (entry["top_logprobs"].as_array().unwrap(), entry["logprob"].as_f64().unwrap());
        assert_eq!(top.len(), 3);
        // The likeliest token is taken at temperature 0.
        assert!(own <= 0.0 && top[0]["logprob"].as_f64() == Some(own) && top[0]["token"] == entry["token"], "{entry}");
    }
    let text: String = content.iter().take(11).filter_map(|e| e["token"].as_str()).collect();
    assert_eq!(text, "17 + 25 = 42.");
    let events = server.post("/v1/chat/completions", &body(true)).events(true);
    let pieces = events.iter().filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array()).flatten();
    assert_eq!(&pieces.cloned().collect::<Vec<Value>>(), content);
    let without = server.post("/v1/chat/completions", &json!({ "messages": messages, "logprobs": false })).json();
    assert_eq!(without["choices"][0]["logprobs"], Value::Null);

    let whole = complete(&server, json!({ "logprobs": 2 }));
    let body =
        json!({ "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "logprobs": 2, "stream": true });
    let events = server.post("/v1/completions", &body).events(true);
    for field in ["tokens", "token_logprobs", "text_offset", "top_logprobs"] {
        let pieces = events.iter().filter_map(|e| e["choices"][0]["logprobs"][field].as_array()).flatten();
        let pieces: Vec<Value> = pieces.cloned().collect();
        assert_eq!(Value::from(pieces), whole["logprobs"][field], "{field}");
    }
    for (path, body, param) in [
        ("/v1/chat/completions", json!({ "messages": messages, "top_logprobs": 3 }), "top_logprobs"),
        ("/v1/chat/completions", json!({ "messages": messages, "logprobs": true, "top_logprobs": 21 }), "top_logprobs"),
        ("/v1/completions", json!({ "prompt": "x", "logprobs": true }), "logprobs"),
        ("/v1/chat/completions", json!({ "messages": messages, "echo": true }), "echo"),
    ] {
        let refused = server.post(path, &body);
        assert_eq!((refused.status, refused.param().as_deref()), (400, Some(param)), "{}", refused.text());
    }
}
