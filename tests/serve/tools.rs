//! Tools, reasoning and structured output.

use serde_json::{Value, json};

use crate::{QUESTION, binary::*, chat, client::Server, content};

fn tools() -> Value {
    let parameters = json!({ "type": "object", "properties": { "city": { "enum": ["Oslo", "Paris"] }, "days": { "type": "integer", "minimum": 1,
        "maximum": 9 } }, "required": ["city", "days"], "additionalProperties": false });
    json!([{ "type": "function", "function": { "name": "get_weather", "description": "The weather", "parameters": parameters } }])
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[test]
fn answers_have_the_structure_that_was_asked_for() {
    let server = Server::start(&[]);
    let schema = json!({ "type": "object", "properties": { "sum": { "type": "integer" }, "parts": { "type": "array", "items":
        { "type": "integer", "maximum": 99, "minimum": 0 }, "minItems": 2, "maxItems": 2 } }, "required": ["sum", "parts"], "additionalProperties": false });
    let ask = |more: Value| server.post("/v1/chat/completions", &with(chat(QUESTION), more));
    for more in [
        json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": schema, "strict": true } } }),
        json!({ "structured_outputs": { "json": schema } }),
        json!({ "guided_json": schema.to_string() }),
    ] {
        let answer = ask(with(more.clone(), json!({ "max_tokens": 200 })));
        assert_eq!(answer.status, 200, "{}", answer.text());
        let value: Value =
            serde_json::from_str(content(&answer.json())).unwrap_or_else(|e| panic!("{more}: {e}: {}", answer.text()));
        assert!(value["sum"].is_i64() && value["parts"].as_array().unwrap().len() == 2, "{value}");
        assert_eq!(answer.json()["choices"][0]["finish_reason"], "stop");
    }
    for (more, fits) in [
        (
            json!({ "structured_outputs": { "choice": ["blue", "red"] } }),
            &(|t: &str| ["blue", "red"].contains(&t)) as &dyn Fn(&str) -> bool,
        ),
        (json!({ "guided_regex": "[A-F]{3}-[0-9]{2}" }), &|t: &str| t.len() == 6 && t.as_bytes()[3] == b'-'),
        (json!({ "guided_grammar": "start: \"x\" \"y\"" }), &|t: &str| t == "xy"),
    ] {
        let answer = ask(more.clone()).json();
        assert!(fits(content(&answer)), "{more}: {answer}");
        // Several choices of one prompt each have their own state.
        let answer = ask(with(more, json!({ "n": 2, "temperature": 1.5, "seed": 3 }))).json();
        for choice in answer["choices"].as_array().unwrap() {
            assert!(fits(choice["message"]["content"].as_str().unwrap()), "{answer}");
        }
    }
    let answer = server.post("/v1/completions", &json!({ "prompt": "A colour:", "guided_choice": ["blue"] })).json();
    assert_eq!(
        (&answer["choices"][0]["text"], &answer["choices"][0]["finish_reason"]),
        (&json!("blue"), &json!("stop"))
    );
    for (more, param) in [
        (json!({ "response_format": { "type": "yaml" } }), Some("response_format.type")),
        (json!({ "guided_json": "{" }), Some("guided_json")),
        (json!({ "guided_choice": "x" }), Some("guided_choice")),
        (json!({ "guided_regex": "a", "guided_choice": ["a"] }), Some("guided_choice")),
        (json!({ "guided_regex": "(" }), None),
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": { "type": "strin" } } } }),
            None,
        ),
    ] {
        let answer = ask(more.clone());
        assert_eq!((answer.status, answer.param().as_deref()), (400, param), "{more}: {}", answer.text());
    }
}

#[test]
fn a_required_call_comes_whole_and_in_pieces() {
    let server = Server::start(&[]);
    for choice in [json!("required"), json!({ "type": "function", "function": { "name": "get_weather" } })] {
        let more = json!({ "tools": tools(), "tool_choice": choice, "parallel_tool_calls": false, "max_tokens": 200 });
        let body = with(chat("Weather?"), more);
        let answer = server.post("/v1/chat/completions", &body).json();
        let said = &answer["choices"][0];
        assert_eq!(
            (&said["finish_reason"], &said["message"]["content"]),
            (&json!("tool_calls"), &Value::Null),
            "{answer}"
        );
        let [call] = &said["message"]["tool_calls"].as_array().unwrap()[..] else { panic!("{answer}") };
        assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("get_weather")));
        let arguments = call["function"]["arguments"].as_str().unwrap();
        let value: Value = serde_json::from_str(arguments).unwrap();
        assert!(["Oslo", "Paris"].contains(&value["city"].as_str().unwrap()) && value["days"].as_i64().unwrap() < 10);

        let events = server.post("/v1/chat/completions", &with(body.clone(), json!({ "stream": true }))).events(true);
        let deltas: Vec<&Value> =
            events.iter().flat_map(|e| e["choices"][0]["delta"]["tool_calls"].as_array()).flatten().collect();
        assert_eq!(
            (&deltas[0]["function"]["name"], &deltas[0]["index"]),
            (&json!("get_weather"), &json!(0)),
            "{events:?}"
        );
        assert!(deltas[0]["id"].as_str().unwrap().starts_with("call_") && deltas.len() > 3);
        let joined: String = deltas.iter().map(|d| d["function"]["arguments"].as_str().unwrap()).collect();
        assert_eq!(joined, arguments);
        assert!(deltas[1..].iter().all(|d| d.get("id").is_none()));
        assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

        // The call and its result go back.
        let messages = json!([{ "role": "user", "content": "Weather?" }, said["message"],
            { "role": "tool", "tool_call_id": call["id"], "content": "rain" }]);
        let answer =
            server.post("/v1/chat/completions", &json!({ "messages": messages, "tools": tools(), "max_tokens": 5 }));
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    for (more, param) in [
        (
            json!({ "tools": tools(), "tool_choice": { "type": "function", "function": { "name": "other" } } }),
            "tool_choice",
        ),
        (json!({ "tool_choice": "required" }), "tool_choice"),
        (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
        (json!({ "tools": [{ "type": "function", "function": { "name": "a b" } }] }), "tools[0].function.name"),
        (
            json!({ "tools": [{ "type": "function", "function": { "name": "a", "parameters": 7 } }] }),
            "tools[0].function.parameters",
        ),
    ] {
        let answer = server.post("/v1/chat/completions", &with(chat("x"), more.clone()));
        assert_eq!((answer.status, answer.param().as_deref()), (400, Some(param)), "{more}: {}", answer.text());
    }
}

#[test]
fn anthropic_has_blocks_for_calls() {
    let server = Server::start(&[]);
    let schema = &tools()[0]["function"]["parameters"];
    let body = json!({ "max_tokens": 200, "tools": [{ "name": "get_weather", "input_schema": schema }], "tool_choice": { "type": "any", "disable_parallel_tool_use": true },
        "messages": [{ "role": "user", "content": "Weather?" }] });
    let answer = server.post("/v1/messages", &body).json();
    let block = &answer["content"][0];
    assert_eq!(
        (&block["type"], &block["name"], &answer["stop_reason"]),
        (&json!("tool_use"), &json!("get_weather"), &json!("tool_use")),
        "{answer}"
    );
    assert!(block["input"]["days"].is_i64());
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = server.post("/v1/messages", &streamed).events(false);
    let input: String = events.iter().filter_map(|e| e["delta"]["partial_json"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&input).unwrap(), block["input"], "{events:?}");
}

/// The demo model with a template that opens reasoning unless it is told not to: all that it says is reasoning.
#[test]
fn reasoning_is_apart() {
    let dir = copy_of("models/demo", "reasoning");
    edit_json(&dir, "tokenizer_config.json", |config| {
        let own = config["chat_template"].as_str().unwrap();
        let more = "{# until </think> #}{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}";
        config["chat_template"] = format!("{own}{more}").into();
    });
    let server = Server::start(&["-m", dir.dir()]);
    let body = with(chat(QUESTION), json!({ "max_tokens": 8, "ignore_eos": true }));
    let answer = server.post("/v1/chat/completions", &body).json();
    let message = &answer["choices"][0]["message"];
    let thought = message["reasoning"].as_str().unwrap_or_else(|| panic!("{answer}"));
    assert_eq!((&message["content"], &message["reasoning_content"]), (&json!(""), &json!(thought)));
    assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 8);
    let events = server.post("/v1/chat/completions", &with(body.clone(), json!({ "stream": true }))).events(true);
    let streamed: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["reasoning"].as_str()).collect();
    assert_eq!(streamed, thought);
    for off in [json!({ "chat_template_kwargs": { "enable_thinking": false } }), json!({ "reasoning_effort": "none" })]
    {
        let answer = server.post("/v1/chat/completions", &with(chat(QUESTION), off)).json();
        assert_eq!((content(&answer), answer["choices"][0]["message"].get("reasoning")), ("17 + 25 = 42.", None));
        assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
    }
    let anthropic = json!({ "max_tokens": 8, "messages": [{ "role": "user", "content": QUESTION }] });
    let answer = server.post(
        "/v1/messages",
        &with(anthropic.clone(), json!({ "thinking": { "type": "enabled", "budget_tokens": 5 } })),
    );
    assert_eq!(answer.json()["content"][0]["type"], "thinking", "{}", answer.text());
    let answer = server.post("/v1/messages", &with(anthropic, json!({ "thinking": { "type": "disabled" } }))).json();
    assert!(answer["content"][0]["text"].as_str().unwrap().starts_with("17 + 25"), "{answer}");
}

#[test]
fn the_last_message_is_continued() {
    let server = Server::start(&[]);
    let messages = json!([{ "role": "user", "content": QUESTION }, { "role": "assistant", "content": "17 + 25" }]);
    let body = json!({ "messages": messages, "continue_final_message": true, "add_generation_prompt": false });
    let answer = server.post("/v1/chat/completions", &body).json();
    assert_eq!(content(&answer), " = 42.");
}

/// Every protocol has tools and structures by the same machinery.
#[test]
fn responses_and_ollama_have_calls() {
    let server = Server::start(&[]);
    let mut tool = tools()[0]["function"].clone();
    tool["type"] = "function".into();
    let body = json!({ "input": "Weather?", "tools": [tool], "tool_choice": "required", "parallel_tool_calls": false, "max_output_tokens": 200 });
    let answer = server.post("/v1/responses", &body).json();
    let [call] = &answer["output"].as_array().unwrap()[..] else { panic!("{answer}") };
    assert_eq!(
        (&call["type"], &call["name"], &answer["status"]),
        (&json!("function_call"), &json!("get_weather"), &json!("completed"))
    );
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["days"].is_i64());
    let events = server.post("/v1/responses", &with(body.clone(), json!({ "stream": true }))).events(false);
    let deltas: String = events
        .iter()
        .filter(|e| e["type"] == "response.function_call_arguments.delta")
        .map(|e| e["delta"].as_str().unwrap())
        .collect();
    assert_eq!(deltas, call["arguments"].as_str().unwrap());
    let output = &events.last().unwrap()["response"]["output"];
    assert_eq!((&output[0]["name"], &output[0]["arguments"]), (&call["name"], &call["arguments"]));
    // The call and its output go back.
    let input = json!([{ "role": "user", "content": "Weather?" }, call,
        { "type": "function_call_output", "call_id": call["call_id"], "output": "rain" }]);
    let answer = server
        .post("/v1/responses", &with(body, json!({ "input": input, "tool_choice": "auto", "max_output_tokens": 5 })));
    assert_eq!(answer.status, 200, "{}", answer.text());

    let schema = json!({ "type": "object", "properties": { "sum": { "type": "integer", "minimum": 0, "maximum": 99 } }, "required": ["sum"], "additionalProperties": false });
    let format = json!({ "format": { "type": "json_schema", "name": "x", "strict": true, "schema": schema } });
    let answer =
        server.post("/v1/responses", &json!({ "input": QUESTION, "text": format, "max_output_tokens": 99 })).json();
    let text = answer["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(text).unwrap()["sum"].is_i64(), "{answer}");
    assert_eq!(answer["text"], format);

    let said = json!([{ "role": "user", "content": QUESTION }]);
    let ollama = |more: Value| server.post("/api/chat", &with(json!({ "messages": said, "stream": false }), more));
    let answer = ollama(json!({ "format": schema, "options": { "num_predict": 99 } })).json();
    let text = answer["message"]["content"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(text).unwrap()["sum"].is_i64(), "{answer}");
    // A strict tool beside a structure: the answer is one of the two.
    let mut strict = tools();
    strict[0]["function"]["strict"] = true.into();
    let answer =
        ollama(json!({ "tools": strict, "format": schema, "options": { "num_predict": 200, "temperature": 0 } }))
            .json();
    let is_sum =
        serde_json::from_str::<Value>(answer["message"]["content"].as_str().unwrap()).is_ok_and(|v| v["sum"].is_i64());
    assert!(is_sum || answer["message"]["tool_calls"][0]["function"]["arguments"]["days"].is_i64(), "{answer}");
    let back = json!([said[0], { "role": "assistant", "content": "", "tool_calls": [{ "function": { "name": "get_weather", "arguments": { "city": "Oslo" } } }] },
        { "role": "tool", "tool_name": "get_weather", "content": "rain" }]);
    let answer = server.post(
        "/api/chat",
        &json!({ "messages": back, "tools": tools(), "stream": false, "options": { "num_predict": 5 } }),
    );
    assert_eq!(answer.status, 200, "{}", answer.text());
    let image = json!({ "messages": [{ "role": "user", "content": "x", "images": ["aGk="] }] });
    let refused = server.post("/api/chat", &image);
    assert!(refused.status == 400 && refused.text().contains("messages[0].images"), "{}", refused.text());
}

#[test]
fn what_contradicts_itself_is_refused() {
    let server = Server::start(&[]);
    let object = json!({ "type": "json_object" });
    for (more, param) in [
        (json!({ "tools": tools(), "tool_choice": "required", "response_format": object }), "tool_choice"),
        (json!({ "tools": tools(), "parallel_tool_calls": "no" }), "parallel_tool_calls"),
        (json!({ "add_generation_prompt": 1 }), "add_generation_prompt"),
        (json!({ "continue_final_message": true, "add_generation_prompt": true }), "continue_final_message"),
        (json!({ "priority": "high" }), "priority"),
    ] {
        let answer = server.post("/v1/chat/completions", &with(chat("x"), more.clone()));
        assert_eq!((answer.status, answer.param().as_deref()), (400, Some(param)), "{more}: {}", answer.text());
    }
    // With tools that may be called, the structure still holds the content.
    let more =
        json!({ "tools": tools(), "response_format": object, "max_tokens": 200, "temperature": 0, "priority": -1 });
    let answer = server.post("/v1/chat/completions", &with(chat(QUESTION), more)).json();
    let message = &answer["choices"][0]["message"];
    let is_object = message["content"]
        .as_str()
        .is_some_and(|text| serde_json::from_str::<Value>(text).is_ok_and(|v| v.is_object()));
    assert!(
        is_object
            || message["tool_calls"][0]["function"]["name"] == "get_weather"
            || answer["choices"][0]["finish_reason"] == "length",
        "{answer}"
    );
}
