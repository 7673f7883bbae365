"""A tokenizer whose words are numbers, for trainers that ask for one."""


def number_tokenizer(size=32):
    """A tokenizer of the words from ``"0"`` to the largest number below *size*, each its own token."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(size)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="0", eos_token="1", bos_token="2", unk_token="0")
