"""The words of gapless and what they mean: the larger part of the chat data. Pure data."""

# Wordings of a question are separated by "|". {x} is filled with a term.
TERM_FORMS = (
    "What is {x}?|What's {x}?|what is {x}|Explain {x}.|What does {x} mean?|What does {x} mean in gapless?|What is "
    "{x} in gapless?|Tell me about {x}.|Can you explain {x}?|Define {x}.|Please explain {x}.|How do you define "
    "{x}?|I do not know what {x} is.|What do you call {x}?|What is meant by {x}?|Could you tell me what {x} is?|"
    "Describe {x}.|{x}?"
)

# The names of a term, and what is true of it.
TERMS: tuple[tuple[str, str], ...] = (
    (
        "gapless",
        "gapless is an LLM inference and serving engine in Python on PyTorch. In it the host never makes the "
        "device wait, the device never makes the host wait, and both are proved.",
    ),
    (
        "depth|the depth",
        "Depth is how many steps may be in flight at once. Depth 1 is the reference; depth 2, 4 and 8 are the same "
        "code.",
    ),
    (
        "a step|step",
        "A step is one forward pass of one batch.",
    ),
    (
        "a packet|the packet|packet",
        "A packet is all bytes that go from the host to the device in one step. It is one copy.",
    ),
    (
        "the outbox|an outbox|outbox",
        "The outbox is all bytes that come from the device to the host in one step: tokens, flags and the step number.",
    ),
    (
        "a fence|fence|the fence",
        "A fence is a point on a stream that can be waited for.",
    ),
    (
        "a lease|lease|the lease",
        "A lease is a claim that keeps a page, a row or a buffer from being used again until a fence has passed.",
    ),
    (
        "the ledger|a ledger|ledger",
        "The ledger is the one place that retires pages, rows and slots. Nothing is freed; it is retired at a fence.",
    ),
    (
        "settled|a settled token|settled token",
        "Settled means known to the host. A token is settled when its step has been observed.",
    ),
    (
        "a row|row",
        "A row is the slot of a request in the tables on the device.",
    ),
    (
        "a page|page|a KV page",
        "A page is a block of the KV cache.",
    ),
    (
        "a request|request",
        "A request is one prompt with its sampling parameters, and the tokens that answer it.",
    ),
    (
        "an inert row|inert row|an inert row in a batch",
        "An inert row belongs to a finished request. It writes to the null page and publishes nothing, so running "
        "ahead is harmless.",
    ),
    (
        "a stream|stream|the compute stream",
        "A stream is a queue of device work. Work on one stream runs in order.",
    ),
    (
        "the prefix cache|prefix caching|the prefix index",
        "The prefix cache keeps full pages of settled tokens, so that requests with the same start share them.",
    ),
    (
        "continuous batching",
        "Continuous batching lets requests join and leave the batch at every step.",
    ),
    (
        "chunked prefill",
        "Chunked prefill cuts a long prompt into pieces, so that a step stays within its token budget.",
    ),
    (
        "prefill",
        "Prefill is the part of a request that reads the prompt.",
    ),
    (
        "decode",
        "Decode is the part of a request that makes new tokens, one step after the other.",
    ),
    (
        "TTFT|ttft",
        "TTFT is the time to the first token.",
    ),
    (
        "TPOT|tpot",
        "TPOT is the time per output token.",
    ),
    (
        "preemption",
        "Preemption takes the pages of a request away and computes them again later. It acts only when nothing of "
        "the request is in flight.",
    ),
    (
        "the loop|the gapless loop",
        "The loop is plan, launch, observe, commit, retire. There is only one loop.",
    ),
    (
        "observe|the observe stage",
        "Observe is the one place where the loop waits: for the fence of the oldest step.",
    ),
    (
        "plan|the plan stage",
        "Plan decides which rows take part in a step and with how many tokens. It is pure Python over integers.",
    ),
    (
        "launch|the launch stage",
        "Launch puts a step on the compute stream. It never waits: it enqueues or it declines.",
    ),
    (
        "commit|the commit stage",
        "Commit gives the settled tokens to their requests.",
    ),
    (
        "retire|the retire stage",
        "Retire gives pages, rows and slots back when the last step that used them has completed.",
    ),
    (
        "SimDevice|the SimDevice",
        "SimDevice is a device with a seeded adversary that decides when each stream moves. It finds races without "
        "a GPU.",
    ),
    (
        "CpuDevice|the CpuDevice",
        "CpuDevice runs each stream on its own thread, so a plain CPU has the same asynchrony as a GPU.",
    ),
    (
        "CudaDevice|the CudaDevice",
        "CudaDevice runs streams and events of an NVIDIA GPU through PyTorch.",
    ),
    (
        "the depth oracle|depth oracle",
        "The depth oracle checks that the same requests give the same tokens at depth 1, 2, 4 and 8.",
    ),
    (
        "the checksum model|checksum model",
        "The checksum model is a test model whose next token is a hash of every KV entry it may read, so that any "
        "stale entry shows.",
    ),
    (
        "the demo model|your model",
        "The demo model is a small Qwen3 model of about three million parameters. It was trained on text that the "
        "repository generates.",
    ),
    (
        "a token|token",
        "A token is a piece of text with a number. The model reads and writes tokens.",
    ),
    (
        "the KV cache|KV cache",
        "The KV cache keeps the keys and values of past tokens in pages.",
    ),
    (
        "run-ahead|running ahead",
        "Run-ahead means that the host plans and launches the next steps while the device still works on earlier ones.",
    ),
)
