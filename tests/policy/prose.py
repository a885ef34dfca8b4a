# The prose of a file: comments, docstrings, error texts and the names of tests as words; of a document everything but
# its code. Text in backticks is code. Consecutive lines are one text.
import io
import re
import tokenize

CPP = {".cpp", ".h", ".cu", ".cuh"}
SHELL = {".sh", ".cmake", ".toml", ".txt"}
CPP_PIECE = re.compile(
    r"""(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)|R"(?P<mark>[^\s()\\]{0,16})\((?P<raw>.*?)\)(?P=mark)"
    |"(?P<text>(?:\\.|[^"\\\n])*)"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'""",
    re.S | re.X,
)
CODE = re.compile(r"```.*?```|``.*?``|`[^`]*`|<!--.*?-->", re.S)
FIELD = re.compile(r"\{\{|\}\}|\{(?:[^{}]|\{[^{}]*\})*\}")
TEST_NAME = re.compile(r"^def (test_\w+)|^TEST(?:_P|_F)?\(\w+, (\w+)\)", re.M)


def string_pieces(text, quoted):
    """The texts of a string; the fields of an f-string are code (one token holds them all before Python 3.12)."""
    prefix = re.match(r"\w*", text)[0].lower() if quoted else ""
    text = re.sub(r"^\w{0,2}(\"\"\"|'''|\"|')|(\"\"\"|'''|\"|')$", "", text) if quoted else text
    if "f" not in prefix:
        yield text
        return
    text = FIELD.sub(lambda m: " " if m[0] in ("{{", "}}") else "\0", text)
    for n, part in enumerate(text.split("\0")):
        yield from ("", part) if n else (part,)


def python_pieces(text):
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")
        elif token.type == tokenize.STRING or token.type == getattr(tokenize, "FSTRING_MIDDLE", -1):
            yield from string_pieces(token.string, token.type == tokenize.STRING)
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            yield ""  # code between two texts


def cpp_pieces(text):
    at = 0
    for m in CPP_PIECE.finditer(text):
        if text[at : m.start()].strip():
            yield ""
        at = m.end()
        if m["line"] or m["block"]:
            yield re.sub(r"^/[/*]+ ?|\*/$|^\s*\* ?", "", m[0], flags=re.M)
        else:
            yield m["raw"] or m["text"] or ""


def test_names(text):
    for m in TEST_NAME.finditer(text):
        yield (m[1] or re.sub(r"(?<!^)(?=[A-Z])", "_", m[2])).replace("_", " ").lower()


def pieces(path):
    text = path.read_text()
    if path.suffix == ".md":
        return [text]
    if path.suffix == ".py":
        found = list(python_pieces(text))
    elif path.suffix in CPP:
        found = list(cpp_pieces(text))
    else:
        found = [m[1] if m else "" for m in (re.search(r"(?:^|\s)#+ ?(.*)", line) for line in text.splitlines())]
    return [*found, "", *(name for test in test_names(text) for name in (test, ""))]


def prose(path):
    """Texts of a file, each in one line. What has no space in it is a name or a number."""
    texts = CODE.sub(" ` ", "\n".join(piece or "\0" for piece in pieces(path))).split("\0")
    texts = (re.sub(r"\s+", " ", text).strip() for text in texts)
    return [text for text in texts if " " in text]
