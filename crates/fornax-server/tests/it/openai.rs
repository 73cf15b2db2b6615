//! OpenAI's endpoints on the tiny model: that every field does what it says.

use serde_json::{Value, json};

use crate::server::Server;

const CHAT: &str = "/v1/chat/completions";

fn user(text: &str) -> Value {
    json!([{ "role": "user", "content": text }])
}

#[test]
fn a_chat_is_answered() {
    let server = Server::real();
    let answer = server.ok(CHAT, &json!({ "messages": user("hi"), "max_tokens": 8, "seed": 1 }));
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "tiny");
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert!(choice["message"]["content"].is_string());
    assert_eq!(answer["usage"]["completion_tokens"], 8);
    assert_eq!(choice["finish_reason"], "length");
}
