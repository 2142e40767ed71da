"""Terms of the field and what they mean: the larger part of the chat data. Pure data.

Nothing here describes how gapless works or is used: what is trained into the weights cannot follow a change of it.
"""

# Wordings of a question are separated by "|". {x} is filled with a term.
TERM_FORMS = (
    "What is {x}?|What's {x}?|what is {x}|Explain {x}.|What does {x} mean?|What does {x} mean in serving?|What is "
    "{x} in an engine?|Tell me about {x}.|Can you explain {x}?|Define {x}.|Please explain {x}.|How do you define "
    "{x}?|I do not know what {x} is.|What do you call {x}?|What is meant by {x}?|Could you tell me what {x} is?|"
    "Describe {x}.|{x}?"
)

# The names of a term, and what is true of it.
TERMS: tuple[tuple[str, str], ...] = (
    ("gapless", "gapless is an LLM inference and serving engine. I am the demo model that comes with it."),
    ("the demo model|your model", "The demo model is a very small Qwen3 model, trained on generated text."),
    ("a language model|language model|an LLM", "A language model reads tokens and predicts the next one."),
    ("a token|token", "A token is a piece of text with a number. The model reads and writes tokens."),
    ("a tokenizer|tokenizer|the tokenizer", "A tokenizer cuts text into tokens and joins tokens to text again."),
    ("a prompt|prompt|the prompt", "A prompt is the text that a model reads before it answers."),
    ("a step|step", "A step is one forward pass of one batch."),
    ("a batch|batch|the batch", "A batch is the set of requests that one forward pass works on."),
    ("a request|request", "A request is one prompt with its sampling parameters, and the tokens that answer it."),
    ("a stream|stream|the compute stream", "A stream is a queue of device work. Work on one stream runs in order."),
    ("a fence|fence|the fence", "A fence is a point on a stream that can be waited for."),
    ("a kernel|kernel|a GPU kernel", "A kernel is a program that runs on the device in many threads at once."),
    ("a CUDA graph|CUDA graph|graph capture", "A CUDA graph is a list of kernels that is launched in one call."),
    ("the host|host", "The host is the processor that plans the work and launches it on the device."),
    ("a page|page|a KV page", "A page is a block of the KV cache."),
    ("the KV cache|KV cache", "The KV cache keeps the keys and values of past tokens."),
    ("attention|the attention", "Attention lets each token read the keys and values of the tokens before it."),
    (
        "the prefix cache|prefix caching|a prefix cache",
        "The prefix cache lets requests with the same start share pages of it.",
    ),
    ("continuous batching", "Continuous batching lets requests join and leave the batch at every step."),
    ("chunked prefill", "Chunked prefill cuts a long prompt into pieces, so that no step takes too long."),
    ("prefill", "Prefill is the part of a request that reads the prompt."),
    ("decode|decoding", "Decode is the part of a request that makes new tokens, one step after the other."),
    ("speculative decoding|speculation", "Speculative decoding checks several drafted tokens in one forward pass."),
    ("preemption", "Preemption takes the pages of a request away and computes them again later."),
    ("throughput|the throughput", "Throughput is how many tokens are made in a second over all requests."),
    ("latency|the latency", "Latency is the time that a request waits for its answer."),
    ("TTFT|ttft", "TTFT is the time to the first token."),
    ("TPOT|tpot", "TPOT is the time per output token."),
    ("logits|the logits", "Logits are the scores of all tokens before they become probabilities."),
    ("temperature|the temperature", "Temperature divides the logits: a low one makes the likely tokens likelier."),
    ("top-p|top_p|nucleus sampling", "Top-p keeps the most likely tokens whose probabilities add up to p."),
    ("top-k|top_k", "Top-k keeps the k most likely tokens."),
    ("greedy decoding|greedy sampling", "Greedy decoding takes the most likely token at every step."),
    ("a log-probability|log-probability|a logprob", "A log-probability is the logarithm of a token's probability."),
    ("a stop string|stop string", "A stop string ends the answer where it appears."),
    ("tensor parallelism", "Tensor parallelism cuts every matrix into parts, one for each device."),
    ("quantization|quantisation", "Quantization stores weights in fewer bits."),
)
