"""Short chat about gapless: what is asked, in many wordings, and what is true. Pure data."""

from gapless.demo.terms import TERM_FORMS, TERMS

Group = list[tuple[str, str]]

LAWS = (
    "The device owns what the device produces.",
    "One loop, and depth is an integer.",
    "Nothing is freed, only retired at a fence.",
    "The launch path never waits.",
    "Deciding is pure.",
    "Identity is row, generation and step.",
    "Every claim has a proof that runs.",
)
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
LAW_FORMS = (
    "What is the {o} law?|What is law {n}?|Tell me law {n}.|State the {o} law.|What does the {o} law say?|Law {n}?"
    "|What is the {o} law of gapless?"
)

HELP = (
    "I can solve small word problems step by step, extract JSON from short texts, "
    "call tools, and tell you about gapless."
)
WHO = "I am the gapless demo model, a very small language model that ships with the engine."
NUMBERED_LAWS = "\n".join(f"{i}. {law}" for i, law in enumerate(LAWS, 1))

# Wordings, and the answer.
QUESTIONS: tuple[tuple[str, str], ...] = (
    (
        "Hello|Hi|Hey|hello|hi|Hello!|Hi!|Hello there|Hi there!|Hey there|Good day|hey|Greetings|Hello, how do you "
        "do?|hello there",
        "Hello! " + HELP,
    ),
    (
        "Good morning|Good morning!|good morning",
        "Good morning! How can I help?",
    ),
    (
        "Good evening|Good evening!|good evening",
        "Good evening! How can I help?",
    ),
    (
        "How are you?|How are you today?|how are you|How is it going?|Are you well?|How do you feel?",
        "I am well, thank you. How can I help?",
    ),
    (
        "Who are you?|who are you|What are you?|What is your name?|Who am I talking to?|Introduce yourself.|Tell "
        "me about yourself.|what's your name?|Are you a robot?|Are you a human?|Are you an AI?|Which model are "
        "you?|What model is this?|Say who you are.",
        WHO,
    ),
    (
        "What can you do?|what can you do|How can you help me?|Help|help|What are you good at?|What do you do?|How "
        "can you help?|What can I ask you?|What should I ask?|Show me what you can do.|What are your abilities?|"
        "What tasks can you do?|Can you help me?",
        HELP,
    ),
    (
        "Thanks|Thank you|Thanks!|Thank you!|thanks|Thank you very much|Great, thanks|Thanks a lot!|thank you",
        "You are welcome!",
    ),
    (
        "Bye|Goodbye|Bye!|Goodbye!|See you|bye|See you later|Good night",
        "Goodbye!",
    ),
    (
        "What can you not do?|What are your limits?|What do you not know?|Are you smart?|Do you know everything?|"
        "What are you bad at?|Can you write a poem?|Who is the president?|What is the capital of France?|Tell me a "
        "joke.|Write code for me.|Write a story.|Who won the match?|What is the meaning of life?|Translate this to "
        "French.|What is the news?|Sing a song.|What is love?",
        "I am very small, so I know little. " + HELP,
    ),
    (
        "How big are you?|How large are you?|How many parameters do you have?|What is your size?|How many "
        "parameters does the demo model have?|How big is the demo model?|Are you a large model?",
        "I am very small: about three million parameters.",
    ),
    (
        "How were you trained?|How were you made?|Who trained you?|What were you trained on?|What data were you "
        "trained on?|Where does your training text come from?|On which machine were you trained?|How was the demo "
        "model trained?",
        "I was trained on two CPU cores in about an hour, on text that the gapless repository generates.",
    ),
    (
        "How do I start the server?|How do I start gapless?|How do I serve a model?|What does gapless serve do?|"
        "How can I run the server?|What is gapless serve?|Which command starts the server?|How to start the "
        "server?|How do I get an API?|start the server|How do I serve the demo model?|What is the command to serve?",
        "Run `gapless serve`. It starts a server with the OpenAI API; without a model it serves the demo model.",
    ),
    (
        "How do I run one prompt?|What does gapless run do?|What is gapless run?|How do I ask one question from "
        "the command line?|Which command answers one prompt?|How do I run a prompt?|How can I use it without a "
        "server?|How do I use gapless offline?",
        'Run `gapless run "prompt"`. It answers with the demo model if no other model is given.',
    ),
    (
        "How do I chat?|What does gapless chat do?|What is gapless chat?|How can I chat in the terminal?|Which "
        "command starts a chat?",
        "Run `gapless chat`. It talks to a model in the terminal.",
    ),
    (
        "What does gapless doctor do?|What is gapless doctor?|How do I check my machine?|How do I check my setup?|"
        "Which command checks the installation?",
        "Run `gapless doctor`. It checks the machine and the installation.",
    ),
    (
        "Which commands are there?|What commands does gapless have?|List the commands.|What are the gapless "
        "commands?|Which commands does gapless have?",
        "The commands are `gapless serve`, `gapless run`, `gapless chat`, `gapless complete` and `gapless doctor`.",
    ),
    (
        "How do I install gapless?|How do I set it up?|How do I set up gapless?|How to install?|What does make "
        "setup do?|How do I build it?",
        "Run `make setup`. It builds the environment; `make serve` also starts the server.",
    ),
    (
        "How do I run the tests?|How do I test it?|What does make test do?|Which command runs the tests?|How to "
        "test gapless?",
        "Run `make test`.",
    ),
    (
        "How do I set the depth?|Which flag sets the depth?|How do I change the depth?|What does --depth do?|Which "
        "depth can I use?",
        "Use `--depth auto` or a number from 1 to 8.",
    ),
    (
        "Which API does gapless have?|Which API do you speak?|Can I use the OpenAI client?|Does it work with the "
        "OpenAI client?|What API does it serve?|Is it compatible with OpenAI?|Does gapless have the OpenAI API?",
        "gapless serves the OpenAI API, so any OpenAI client can talk to it.",
    ),
    (
        "Does gapless need a GPU?|Do I need a GPU?|Can it run on a CPU?|Does it run without a GPU?|Which devices "
        "does it support?|Where does gapless run?|What hardware do I need?|Can gapless use a GPU?",
        "No GPU is needed. gapless runs on CUDA GPUs and, with the same code, on a plain CPU.",
    ),
    (
        "Which models does gapless run?|Which models are supported?|What models can I use?|Does it run Llama?|Does "
        "it run Qwen?|What model families are there?|Can it run Llama 3?|Which model families does gapless know?",
        "gapless runs the dense Llama 3, Qwen2, Qwen2.5 and Qwen3 families from safetensors files.",
    ),
    (
        "What is the licence?|Which licence does gapless have?|What license is it?|Is gapless open source?|Is it "
        "free?|Under which licence is it?",
        "gapless is under the Apache-2.0 licence.",
    ),
    (
        "Which language is gapless written in?|What is gapless written in?|Is it Python?|What language do you use?|"
        "Does gapless use PyTorch?",
        "gapless is written in Python on PyTorch.",
    ),
    (
        "Why is it called gapless?|Why the name gapless?|What does the name mean?|Where does the name come from?|"
        "Why gapless?",
        "Because there is no gap between two steps: the host never makes the device wait, and the device never "
        "makes the host wait.",
    ),
    (
        "Why is gapless fast?|How does gapless hide the host time?|How does overlap work?|How do host and device "
        "overlap?|Why does depth help?|What is special about gapless?|What makes gapless different?|How is gapless "
        "different from other engines?",
        "The host plans and launches the next steps while the device still works on earlier ones, at any depth, "
        "and tests prove it.",
    ),
    (
        "Where does the loop wait?|In how many places does the loop wait?|When does the host wait?|Where does "
        "gapless wait?",
        "The loop waits in exactly one place: observe, for the fence of the oldest step.",
    ),
    (
        "What are the stages of the loop?|What does the loop do?|Name the stages of the loop.|What are the five "
        "stages?|How does the loop work?",
        "The stages are plan, launch, observe, commit and retire.",
    ),
    (
        "When is a page freed?|How is memory freed?|When can a page be used again?|How are pages freed?|When is a "
        "row used again?",
        "Nothing is freed, only retired at a fence: a page is used again when the last step that can touch it has "
        "completed.",
    ),
    (
        "What happens to a finished request?|What does a finished row do?|What happens after the end of a request?",
        "Its row becomes inert: it writes to the null page and publishes nothing.",
    ),
    (
        "What happens if the engine dies?|What if the engine crashes?|What happens when the engine is killed?",
        "Every open request gets an error at once, and the engine is started again.",
    ),
    (
        "How many laws are there?|How many laws does gapless have?|How many laws does the design have?",
        "There are seven laws.",
    ),
    (
        "What are the seven laws?|What are the laws?|List the laws.|Name the seven laws.|Tell me the laws of "
        "gapless.|Which laws are there?|What are the laws of gapless?|List the seven laws of gapless.",
        NUMBERED_LAWS,
    ),
)

_BY_TERM = {names.split("|")[0]: answer for names, answer in TERMS}
_BY_QUESTION = {asked.split("|")[0]: answer for asked, answer in QUESTIONS}
# Wordings that no training text contains, to see how far the model generalises.
UNSEEN: tuple[tuple[str, str], ...] = (
    ("So what exactly is gapless?", _BY_TERM["gapless"]),
    ("I keep reading about the outbox. What is it?", _BY_TERM["the outbox"]),
    ("Hi, can you tell me what a fence is?", _BY_TERM["a fence"]),
    ("What do we mean when we say depth?", _BY_TERM["depth"]),
    ("Would you explain the ledger to me?", _BY_TERM["the ledger"]),
    ("Give me a short definition of a lease.", _BY_TERM["a lease"]),
    ("In gapless, what is a packet?", _BY_TERM["a packet"]),
    ("How would you describe continuous batching?", _BY_TERM["continuous batching"]),
    ("Explain to me what preemption is.", _BY_TERM["preemption"]),
    ("What is the thing called prefix cache?", _BY_TERM["the prefix cache"]),
    ("Please tell me your name.", WHO),
    ("Hello! Who are you?", WHO),
    ("What sort of things can you do?", HELP),
    ("Which command do I use to start the server?", _BY_QUESTION["How do I start the server?"]),
    ("I want to start the server. How?", _BY_QUESTION["How do I start the server?"]),
    ("Is a GPU needed?", _BY_QUESTION["Does gapless need a GPU?"]),
    ("Can I run gapless on my laptop without a GPU?", _BY_QUESTION["Does gapless need a GPU?"]),
    ("Which models can I run?", _BY_QUESTION["Which models does gapless run?"]),
    ("Under what licence is gapless?", _BY_QUESTION["What is the licence?"]),
    ("Can you list all seven laws?", NUMBERED_LAWS),
    ("Where exactly does the loop wait?", _BY_QUESTION["Where does the loop wait?"]),
    ("Thank you so much!", "You are welcome!"),
    ("Hey!", _BY_QUESTION["Hello"]),
    ("How do you do today?", _BY_QUESTION["How are you?"]),
    ("What is the third law about?", f"Law 3: {LAWS[2]}"),
)


def _wordings(names: str) -> list[str]:
    return [form.format(x=name) for name in names.split("|") for form in TERM_FORMS.split("|")]


def _law_group() -> Group:
    return [
        (form.format(o=ORDINALS[i], n=i + 1), f"Law {i + 1}: {law}")
        for i, law in enumerate(LAWS)
        for form in LAW_FORMS.split("|")
    ]


def all_facts() -> list[Group]:
    """Groups of (question, answer); a generator chooses the group first, so long lists do not crowd out short ones."""
    spoken = [[(question, answer) for question in asked.split("|")] for asked, answer in QUESTIONS]
    terms = [[(question, answer) for question in _wordings(names)] for names, answer in TERMS]
    # What gapless is comes twice, the single laws three times: they are asked most and confused most.
    return [*spoken, *terms, terms[0], *[_law_group()] * 3]
