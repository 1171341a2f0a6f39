"""Questions and answers about Strata itself, from its README and docs. One answer to a question, in many wordings."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from strata.bench.demo_pack.data.sample import Sample, Text, assistant, user


class Fact(NamedTuple):
    """about: what the question is about, in two or three words · asks: wordings, without the mark at their end"""

    about: str
    asks: tuple[str, ...]
    answer: str


FACTS = (
    Fact("what Strata is",
         ("What is Strata", "What does Strata do", "Tell me about Strata", "Explain Strata", "What is this software",
          "Describe Strata",
          "What is Strata for"),
         "Strata is an inference server in Python for Mixture-of-Experts language models that are larger than the "
         "graphics card. It reads "
         "GGUF files and speaks the OpenAI chat API."),
    Fact("the model family",
         ("Which models does Strata run", "Which model family does Strata support", "What models can I use with Strata",
          "What models does Strata serve", "Which models are supported"),
         "Strata runs the model family qwen4exp: Qwen3.8-Flash-Next, with 125 billion parameters of which 6 billion "
         "are active."),
    Fact("starting the server",
         ("How do I start Strata", "How do I start the server", "How can I run Strata", "How do I launch Strata",
          "How is the server started",
          "What command starts the server"),
         "Run make serve. It starts a server on http://127.0.0.1:8080 with the small pack that comes with it."),
    Fact("the tests",
         ("How do I run the tests", "How do I test Strata", "How are the tests started",
          "Which command runs the tests"),
         "Run make test. It runs every test that needs no graphics card."),
    Fact("measuring",
         ("How do I measure the speed", "How do I benchmark Strata", "How can I measure the engine",
          "What is strata-bench",
          "How fast is Strata on my machine"),
         "Run make bench for the small pack, or strata-bench engine --pack FILE for your own. docs/performance.md has "
         "measured figures."),
    Fact("the address",
         ("On which port does Strata listen", "What is the address of the server", "Where does the server listen",
          "Which port is used",
          "What is the default port"),
         "make serve listens on http://127.0.0.1:8080. Another port is set with make serve PORT=9000."),
    Fact("the file format",
         ("Which file format does Strata read", "What files does Strata read", "Which format has the model",
          "Does Strata read GGUF",
          "What is a pack"),
         "Strata reads models from GGUF files. Such a file, or its first shard, is called a pack."),
    Fact("the API",
         ("Which API does Strata speak", "Is Strata compatible with OpenAI", "Can I use the OpenAI client",
          "Which API can I use",
          "How do I talk to Strata from Python"),
         "Strata speaks the OpenAI chat API: any OpenAI client works with the base URL http://127.0.0.1:8080/v1."),
    Fact("the own model",
         ("How do I use my own model", "How do I load another model", "How can I serve a different pack",
          "How do I configure a model"),
         "Write a strata-<model>.json with exe, args and model_name, then start strata-server --config FILE."),
    Fact("the configuration",
         ("Where is the configuration described", "Which options are there", "Where do I find the options",
          "Where are the flags listed",
          "How do I configure Strata"),
         "Every key of the config file and every engine flag is in docs/configuration.md."),
    Fact("the two processes",
         ("How many processes does Strata have", "Which processes are there", "What are the two processes",
          "How is Strata built",
          "What is the architecture of Strata"),
         "Strata has two processes. The engine turns token ids into token ids, and the server turns HTTP into lines "
         "for the engine and tokens "
         "into text."),
    Fact("the engine",
         ("What is the engine", "What does the engine do", "What does the engine know"),
         "The engine computes the model: token ids in, token ids out. It knows no text and no HTTP."),
    Fact("the server",
         ("What does the server do", "What is the job of the server", "What does the server know"),
         "The server knows text, HTTP and the queue. It renders the chat template, encodes the prompt and streams the "
         "answer."),
    Fact("the protocol",
         ("How do the processes talk to each other", "What is the protocol", "How do server and engine communicate",
          "What is the line protocol"),
         "They speak a line protocol of token ids over stdin and stdout. It is written down in docs/protocol.md."),
    Fact("exactness",
         ("What does exact by default mean", "Is Strata exact", "What is exactness", "Are the answers deterministic",
          "Does the same prompt give the same answer", "What is one arithmetic"),
         "What is computed for a token depends on the tokens before it and on nothing else: not on the chunk size, "
         "the window, other requests "
         "or a cache. The same prompt gives the same bits."),
    Fact("the graphics card",
         ("How do I use my graphics card", "How do I run Strata on a GPU", "Does Strata use CUDA",
          "How do I turn on CUDA",
          "Can it run on a card"),
         'Install the extra cuda12 or cuda13 and add "--device", "cuda" to args.'),
    Fact("running without a card",
         ("Does Strata need a GPU", "Can I run Strata without a graphics card", "Does it run on the processor",
          "Can I use it on a CPU"),
         "No graphics card is needed: the engine also runs on the processor, with kernels in numba."),
    Fact("slots",
         ("What is a slot", "What are slots", "How many requests run at once",
          "Can several people use it at the same time",
          "How does batching work"),
         "A slot is a place for a request that is decoded together with others. --batch N gives the engine N slots, "
         "at most 8."),
    Fact("the prompt cache",
         ("What is the prompt cache", "Does Strata cache prompts", "What is a checkpoint",
          "What happens with a prompt that was read before"),
         "A prompt that begins with what a checkpoint, a slot or the last conversation holds is read from there. The "
         "text stays the same."),
    Fact("parked conversations",
         ("What is a parked conversation", "Can conversations be kept on disk",
          "Are conversations kept after a restart",
          "What does parking mean"),
         "A conversation that others push out can be kept in RAM or on disk and continued later, also after a "
         "restart. docs/parking.md says how."),
    Fact("the context length",
         ("How long can the context be", "What is the context length", "How do I set the context length",
          "How many tokens fit"),
         "The context is set with --max-context N. Prompt, new tokens and 8 more must fit."),
    Fact("keys and values",
         ("How are keys and values kept", "Can the KV cache be quantised", "What does --kv do",
          "How do I save memory for keys and values"),
         "--kv says how keys and values are kept: fp32, fp16, int8, q4_0 or k8v4. The text changes with the format."),
    Fact("the prompt chunk",
         ("What is a prompt chunk", "What does --prefill do", "How is a long prompt read"),
         "A prompt is read in chunks. --prefill N sets the tokens of a chunk, and it never changes the text."),
    Fact("experts",
         ("What is an expert", "What are experts", "What is a mixture of experts", "What does MoE mean"),
         "In a Mixture-of-Experts model each layer has many small networks, the experts, and a router picks a few of "
         "them for each token."),
    Fact("sparse attention",
         ("What is sparse attention", "What is QSA", "What does the indexer do"),
         "The indexer scores blocks of earlier tokens, and attention looks only at the best blocks. So long contexts "
         "stay cheap."),
    Fact("the delta net",
         ("What is the gated delta net", "What is a delta net layer", "What is recurrent state"),
         "The gated delta net is a layer that keeps a fixed state instead of keys and values. Three of four layers "
         "are of this kind."),
    Fact("drafts",
         ("What are drafts", "What is MTP", "What is speculative decoding", "What is the draft layer"),
         "A draft layer proposes the next tokens and the model checks several at once. The text stays the same, it "
         "only comes faster."),
    Fact("quantisation",
         ("What is quantisation", "What does Q8_0 mean", "Why are weights quantised"),
         "Weights are stored in few bits, in blocks with a scale. The file gets smaller, and the engine computes on "
         "the packed blocks."),
    Fact("the temperature",
         ("What is the temperature", "What does temperature do", "How do I make answers less random"),
         "Temperature 0 takes the most likely token each time. Higher values make the answers more varied."),
    Fact("the seed",
         ("What is a seed", "What does the seed do", "How do I get the same random answer again"),
         "The seed decides the random draws. The same prompt with the same seed gives the same text."),
    Fact("thinking",
         ("What is thinking", "How do I turn off thinking", "How do I disable the reasoning",
          "Can the reasoning be switched off"),
         'Thinking is what the model writes before its answer. Send "reasoning_effort": "none" to turn it off.'),
    Fact("tools",
         ("Can Strata call tools", "How do tools work", "What is a tool call", "Does it support function calling"),
         "A request can carry tools with JSON schemas. The model may answer with a call of one, and the client sends "
         "back the result."),
    Fact("metrics",
         ("Are there metrics", "How do I monitor the server", "Where are the metrics",
          "Does Strata support Prometheus"),
         "GET /metrics gives the server's figures, as JSON or for Prometheus."),
    Fact("the health check",
         ("How do I check that the server is alive", "Is there a health check", "What is /health"),
         "GET /health says whether the server is alive. It needs no key."),
    Fact("the API key",
         ("How do I set an API key", "Can I protect the server", "Does the server need a key"),
         "Set api_key in the config or --api-key on the command line. Clients then send it as a bearer token."),
    Fact("the licence",
         ("What is the licence of Strata", "Which license does it have", "Is Strata open source", "Is Strata free"),
         "Strata has the MIT licence."),
    Fact("the language",
         ("Which language is Strata written in", "What is Strata written in", "Is it written in Python",
          "Which libraries does Strata use"),
         "Strata is written in Python with NumPy and numba, and CUDA kernels through CuPy. The server uses aiohttp."),
    Fact("the Python version",
         ("Which Python do I need", "What Python version does Strata need", "Does it run on Python 3.10"),
         "Strata needs Python 3.11 or newer."),
    Fact("installing",
         ("How do I install Strata", "How is Strata installed", "What do I have to install",
          "What are the requirements"),
         "Nothing but make and Python 3.11: the first make creates .venv and installs what is needed."),
    Fact("stopping",
         ("How do I stop the server", "How do I quit Strata", "How do I end it"),
         "Press Ctrl-C. It stops the server and the engine."),
    Fact("the demo pack",
         ("What is the demo pack", "What is the small pack", "Which model is in the repository",
          "Why are you so small"),
         "The demo pack is a very small model that the project has trained on its own text, so that Strata can be "
         "tried at once."),
    Fact("the documentation",
         ("Where is the documentation", "Where can I read more", "What should I read first"),
         "Read README.md first, then docs/architecture.md: it follows a request in eight steps."),
    Fact("the name",
         ("Why is it called Strata", "What does the name Strata mean", "Where does the name come from"),
         "Strata are layers. The weights of a model lie in layers of memory: on the card, in RAM and on disk."),
    Fact("lint",
         ("How do I check my code", "What does make lint do", "Which linters are used"),
         "Run make lint. It runs ruff, mypy and import-linter."),
)  # fmt: skip

FRAMES = (
    "{}?", "{}?", "{}?", "{}", "{}, please?", "Hi! {}?", "Hello, {l}?", "A question: {l}?", "Please tell me: {l}?",
    "{} here?", "So {l}?",
    "I would like to know: {l}?", "Quick question: {l}?", "{l}?", "{l}", "I am new here. {}?",
    "Could you tell me: {l}?",
)  # fmt: skip
ABOUT = (
    "Tell me about {}.", "What do you know about {}?", "Can you say something about {} in Strata?",
    "I have a question about {}.",
    "Strata: {}?", "Explain {} in Strata.", "I want to know more about {}.", "What about {}?",
)  # fmt: skip


def about(rng: Random, size: int) -> Sample:
    """Task "about". Held out are wordings, not facts."""
    fact = rng.choice(FACTS)
    if rng.random() < 0.25:
        question = rng.choice(ABOUT).format(fact.about)
    else:
        ask = rng.choice(fact.asks)
        keeps = ask.split()[0] in ("Strata", "MTP", "QSA")
        question = rng.choice(FRAMES).format(ask, l=ask if keeps else ask[0].lower() + ask[1:])
    thinking = rng.random() < 0.75
    last = assistant(fact.answer, f"The question is about {fact.about}." if thinking else None)
    return Sample("about", f"about {question}", [user(question), last], Text(fact.answer), thinking=thinking)
