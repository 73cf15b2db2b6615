"""llama.cpp as the other side of a race: loads a model, then runs one timed round for every line on stdin.

Arguments: MODEL PROMPT GENERATE DEPTH THREADS BATCH. Each answer is one JSON line; times are in seconds, and a part whose
size is 0 is null. The batch part decodes GENERATE tokens for BATCH sequences at once, each after a prompt of 128 tokens.
"""

import ctypes
import json
import sys
import time

import llama_cpp as lib

BATCH_PROMPT = 128


def fail(what):
    print(json.dumps({"error": what}), flush=True)
    sys.exit(1)


class Peer:
    def __init__(self, path, longest, threads, batch):
        self.silent = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self.silent, ctypes.c_void_p(0))
        lib.llama_backend_init()
        options = lib.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(path.encode(), options)
        if not self.model:
            fail(f"llama.cpp cannot load {path}")
        self.words = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.context = self.open(longest, threads, 1)
        # A context of its own: the cache is divided among its sequences.
        self.many = self.open((BATCH_PROMPT + longest) * batch, threads, batch) if batch else None

    def open(self, cells, threads, sequences):
        options = lib.llama_context_default_params()
        options.n_ctx = cells + 256 * sequences
        options.n_batch = 2048
        options.n_ubatch = 512
        options.n_seq_max = sequences
        options.n_threads = options.n_threads_batch = threads
        context = lib.llama_init_from_model(self.model, options)
        if not context:
            fail(f"llama.cpp has no room for a context of {options.n_ctx}")
        return context

    def token(self, i):
        return (i * 2654435761 & 0xFFFFFFFF) % self.words

    def forget(self, context):
        lib.llama_memory_clear(lib.llama_get_memory(context), True)

    def feed(self, tokens):
        for start in range(0, len(tokens), 2048):
            piece = tokens[start : start + 2048]
            ids = (lib.llama_token * len(piece))(*piece)
            if lib.llama_decode(self.context, lib.llama_batch_get_one(ids, len(piece))):
                fail("llama_decode failed")
        lib.llama_synchronize(self.context)

    def prompt(self, n, depth):
        self.forget(self.context)
        tokens = [self.token(i) for i in range(depth + n)]
        if depth:
            self.feed(tokens[:depth])
        begin = time.perf_counter()
        self.feed(tokens[depth:])
        return time.perf_counter() - begin

    def generate(self, n, depth):
        self.forget(self.context)
        self.feed([self.token(i) for i in range(depth + 1)])
        begin = time.perf_counter()
        for i in range(n):
            self.feed([self.token(depth + 1 + i)])
        return time.perf_counter() - begin

    def together(self, n, sequences):
        self.forget(self.many)
        batch = lib.llama_batch_init(max(BATCH_PROMPT, sequences), 0, 1)
        for seq in range(sequences):
            rows = [(self.token(seq * BATCH_PROMPT + i), i, seq, False) for i in range(BATCH_PROMPT)]
            self.rows(batch, rows)
        begin = time.perf_counter()
        for i in range(n):
            self.rows(batch, [(self.token(seq + i), BATCH_PROMPT + i, seq, True) for seq in range(sequences)])
        taken = time.perf_counter() - begin
        lib.llama_batch_free(batch)
        return taken

    def rows(self, batch, rows):
        batch.n_tokens = len(rows)
        for at, (token, position, seq, wanted) in enumerate(rows):
            batch.token[at] = token
            batch.pos[at] = position
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = seq
            batch.logits[at] = wanted
        if lib.llama_decode(self.many, batch):
            fail("llama_decode failed on a batch")
        lib.llama_synchronize(self.many)


def main():
    path = sys.argv[1]
    prompt, generate, depth, threads, sequences = (int(word) for word in sys.argv[2:])
    peer = Peer(path, depth + max(prompt, generate + 1), threads, sequences)
    print(json.dumps({"version": lib.__version__}), flush=True)
    for _ in sys.stdin:
        answer = {
            "prompt_s": peer.prompt(prompt, depth) if prompt else None,
            "generate_s": peer.generate(generate, depth) if generate else None,
            "batch_s": peer.together(generate, sequences) if sequences else None,
        }
        print(json.dumps(answer), flush=True)


main()
