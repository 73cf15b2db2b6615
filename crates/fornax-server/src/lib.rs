//! HTTP over the engine: the protocols of OpenAI and Anthropic, for any number of clients at once.
//! It knows requests, texts and tokens; it knows no device and no kernel.

#![forbid(unsafe_code)]
