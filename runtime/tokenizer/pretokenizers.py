"""How each family of byte-level BPE tokenizers cuts a text into words before merging: `tokenizer.ggml.pre`.

The names are the ones GGUF converters write. The rules are those of each family's tokenizer.json on the hub,
so that ids equal Hugging Face's; where it normalizes to Unicode NFC, so does this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_QWEN35 = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(suffix: str, digits: str) -> str:
    """Words split where upper case follows lower case."""
    head = r"[^\r\n\p{L}\p{N}]?"
    return f"{head}{_UPPER}*{_LOWER}+{suffix}|{head}{_UPPER}+{_LOWER}*{suffix}|{digits}{_CASED_TAIL}"


_GPT4O = _cased(_CONTRACTION + "?", r"\p{N}{1,3}")
_TEKKEN = _cased("", r"\p{N}")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CJK = "[一-龥ࠀ-一가-퟿]+"
# Cased letters as the model's own tokenizer lists them.
_DEEPSEEK_LETTERS = (
    r"\s?["
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}"
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}"
    r"\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}"
    r"\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}"
    r"\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}"
    r"\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}"
    r"\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}"
    r"\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}"
    r"\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}"
    r"\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}"
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}"
    r"\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}"
    r"\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}"
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
    r"]+"
)
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~！-／：-～‘-‟　-。]+"
# As the model has it, r"\s+$", the time for a run of blanks in front of a digit grows with its square.
_BLANKS_AT_THE_END = r"(?<!\s)\s+$"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """Steps in order, each cutting the pieces of the step before: a regular expression (Oniguruma) whose
    matches stand alone, or "digits" (each alone), "numbers" (runs), "punctuation" (runs), "gpt2" (GPT-2's
    own expression).

    nfc: normalize first. ignore_merges: a word that is a whole token is that token, whatever the merges say.
    add_bos: the default where the file does not say.
    """

    steps: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    aliases: tuple[str, ...] = field(default=(), kw_only=True)

    def pipeline(self) -> Tokenizer:
        """The library's tokenizer with this way of cutting and no vocabulary yet."""
        from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

        def built(step: str) -> pre_tokenizers.PreTokenizer:
            if step == "digits":
                return pre_tokenizers.Digits(individual_digits=True)
            if step == "numbers":
                return pre_tokenizers.Digits(individual_digits=False)
            if step == "punctuation":
                return pre_tokenizers.Punctuation(behavior="contiguous")
            if step == "gpt2":
                return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            return pre_tokenizers.Split(Regex(step), behavior="isolated")

        steps = [built(step) for step in self.steps]
        if "gpt2" not in self.steps:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if self.nfc:
            tokenizer.normalizer = normalizers.NFC()
        return tokenizer


_GPT2_ALIASES = (
    "phi-2",
    "jina-es",
    "jina-de",
    "jina-v2-es",
    "jina-v2-de",
    "jina-v1-en",
    "jina-v2-code",
    "roberta-bpe",
    "gigachat",
    "a.x-4.0",
    "mellum",
    "exaone4",
    "jais",
    "trillion",
    "granite-docling",
    "default",
)

FAMILIES: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(("gpt2",), aliases=_GPT2_ALIASES),
    "gpt-neox": PreTokenizer(("gpt2",), nfc=True, aliases=("olmo", "mpt", "modern-bert")),
    "starcoder": PreTokenizer(
        ("digits", "gpt2"), aliases=("refact", "smollm", "codeshell", "exaone", "minerva-7b")
    ),
    "command-r": PreTokenizer(("digits", "gpt2"), nfc=True),
    "llama-bpe": PreTokenizer(
        (_LLAMA3,),
        ignore_merges=True,
        add_bos=True,
        aliases=("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    ),
    "dbrx": PreTokenizer((_LLAMA3,), aliases=("smaug-bpe", "glm4", "chatglm-bpe")),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "stablelm2": PreTokenizer(
        (_QWEN2,),
        aliases=("deepseek-r1-qwen", "megrez", "kormo", "f2llmv2", "hunyuan", "solar-open", "grok-2"),
    ),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "bailingmoe": PreTokenizer((_BAILING,), aliases=("bailingmoe2", "llada-moe")),
    "gpt-4o": PreTokenizer((_GPT4O,), aliases=("llama4", "kanana2", "minimax-m2")),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "falcon": PreTokenizer(("punctuation", "gpt2", "numbers", "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        ("[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, _BLANKS_AT_THE_END, _CJK, "digits")
    ),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, "digits")),
    "deepseek-v3": PreTokenizer(
        (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3), aliases=("hunyuan-dense", "joyai-llm")
    ),
    "bloom": PreTokenizer((_BLOOM,), aliases=("poro-chat", "gpt3-finnish")),
    "viking": PreTokenizer((_BLOOM, "digits")),
}

PRETOKENIZERS: Mapping[str, PreTokenizer] = {
    name: family for first, family in FAMILIES.items() for name in (first, *family.aliases)
}
