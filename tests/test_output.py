import codecs
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseserve_jax.output import OutputProcessor
from sparseserve_jax.request import SamplingParams, TokenLogprob

EOS, OTHER_EOS, STOP_ID = 256, 257, 258


class ByteDetokenizer:
    """Token ids below 256 are bytes; others would show as themselves if they were ever asked for."""

    def __init__(self):
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id):
        return self._utf8.decode(bytes([token_id])) if token_id < 256 else f"<{token_id}>"

    def finish(self):
        return self._utf8.decode(b"", final=True)


def make(**sampling):
    sampling.setdefault("max_tokens", 100)
    return OutputProcessor(
        request_id="r",
        index=0,
        prompt="p",
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(**sampling),
        eos_token_ids={EOS, OTHER_EOS},
        arrival_s=10.0,
        detokenizer=ByteDetokenizer(),
    )


def feed(processor, data, *, streaming=False):
    """Appends tokens (or the bytes of a text) until it ends; the streamed deltas."""
    deltas = []
    for step, token in enumerate(data.encode() if isinstance(data, str) else data):
        reason = processor.append(token, None, 11.0 + step)
        if streaming:
            deltas.append(processor.take_output().delta)
        if reason is not None:
            break
    return deltas


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_any_eos_stops_and_leaves_no_text(eos):
    processor = make()
    feed(processor, [*b"hi", eos, *b"more"])
    output = processor.take_output(final=True)
    assert (output.text, output.token_ids) == ("hi", [*b"hi", eos])
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_ignored_eos_runs_to_max_tokens():
    processor = make(ignore_eos=True, max_tokens=3)
    feed(processor, [EOS, OTHER_EOS, EOS])
    output = processor.take_output()
    assert (output.finish_reason, len(output.token_ids)) == ("length", 3)


def test_stop_token_leaves_no_text_and_is_named():
    processor = make(stop_token_ids=(STOP_ID,), ignore_eos=True)
    feed(processor, [*b"hi", STOP_ID])
    output = processor.take_output()
    assert (output.text, output.finish_reason, output.stop_reason) == ("hi", "stop", STOP_ID)
    assert output.token_ids == [*b"hi", STOP_ID]


def test_stop_string_cuts_text_but_counts_tokens():
    processor = make(stop=("b,c",))
    assert "".join(feed(processor, "a,b,c,d", streaming=True)) == "a,"
    output = processor.take_output()
    assert (output.text, output.finish_reason, output.stop_reason) == ("a,", "stop", "b,c")
    assert bytes(output.token_ids) == b"a,b,c"


def test_stop_string_may_be_kept():
    processor = make(stop=("b,c",), include_stop_str_in_output=True)
    assert "".join(feed(processor, "a,b,c,d", streaming=True)) == "a,b,c"


def test_stop_wins_over_length_at_the_last_token():
    for sampling, data in (({"stop": "c"}, b"abc"), ({}, [*b"ab", EOS])):
        processor = make(max_tokens=3, **sampling)
        feed(processor, list(data))
        assert processor.finish_reason == "stop"


@pytest.mark.parametrize("end", ["length", "eos", "abort", "error"])
def test_near_match_is_released_at_every_end(end):
    processor = make(stop=("world",), max_tokens=9 if end == "length" else 100)
    shown = "".join(feed(processor, "hello wor", streaming=True))
    if end == "eos":
        feed(processor, [EOS])
    elif end == "abort":
        processor.abort()
    elif end == "error":
        processor.fail("broken")
    output = processor.take_output(final=True)
    assert shown + output.delta == output.text == "hello wor"
    assert output.finish_reason == {"eos": "stop"}.get(end, end)
    assert output.error == ("broken" if end == "error" else None)


@pytest.mark.parametrize("end", ["length", "eos", "abort", "error"])
def test_half_a_character_is_flushed_once(end):
    data = "a😀".encode()[:-1]
    processor = make(max_tokens=len(data) if end == "length" else 100)
    shown = "".join(feed(processor, list(data), streaming=True))
    if end == "eos":
        feed(processor, [EOS])
    elif end == "abort":
        processor.abort()
        processor.abort()
    elif end == "error":
        processor.fail("broken")
        processor.abort()
    output = processor.take_output()
    assert shown + output.delta == output.text == "a\ufffd"
    assert processor.take_output().delta == ""


def test_the_flushed_character_may_complete_a_stop_string():
    processor = make(stop=("a\ufffd",), max_tokens=2)
    feed(processor, [ord("a"), 0xF0])
    output = processor.take_output()
    assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "a\ufffd")


def test_min_tokens_holds_off_ids_and_strings():
    processor = make(min_tokens=3, stop=("a",), stop_token_ids=(ord("x"),))
    feed(processor, "axab")
    output = processor.take_output()
    assert (output.text, output.finish_reason, output.stop_reason) == ("axab", None, None)
    feed(processor, "a")
    assert (processor.take_output().text, processor.stop_reason) == ("axab", "a")


def test_an_eos_below_min_tokens_goes_on_but_length_still_ends():
    processor = make(min_tokens=3, max_tokens=3)
    feed(processor, [EOS, EOS, EOS])
    assert processor.finish_reason == "length"


text_tokens = st.text("ab,é😀", max_size=12).map(lambda t: list(t.encode()))


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.tuples(text_tokens, st.lists(st.sampled_from([0xF0, 0x9F, 0x80, ord("a"), EOS, STOP_ID]), max_size=4)),
    stop=st.lists(st.text("ab,é\ufffd", min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    max_tokens=st.integers(4, 20),
    end=st.sampled_from(["abort", "error"]),
)
def test_streaming_equals_not_streaming(tokens, stop, include, min_tokens, max_tokens, end):
    sampling = dict(
        stop=tuple(stop), include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=max_tokens,
        stop_token_ids=(STOP_ID,),
    )  # fmt: skip
    one, other = make(**sampling), make(**sampling)
    data = list(itertools.chain(*tokens))
    deltas = feed(one, data, streaming=True)
    feed(other, data)
    for processor in (one, other):
        processor.abort() if end == "abort" else processor.fail("x")
    streamed, whole = one.take_output(), other.take_output()
    assert "".join(deltas) + streamed.delta == streamed.text == whole.text == whole.delta
    assert (streamed.finish_reason, streamed.stop_reason) == (whole.finish_reason, whole.stop_reason)
    if streamed.stop_reason in stop and not include and not min_tokens:
        assert not any(s in streamed.text for s in stop)


def test_times():
    processor = make()
    processor.note_started(10.5)
    processor.note_started(10.75)
    for now in (11.0, 11.25, 12.0):
        processor.append(ord("a"), None, now)
    metrics = processor.take_output().metrics
    assert (metrics.queue_s, metrics.ttft_s, metrics.tbt_s) == (0.5, 1.0, [0.25, 0.75])


def test_snapshots_do_not_change():
    processor = make(logprobs=1)
    candidates = [TokenLogprob(token_id=ord("a"), logprob=-0.1, rank=1)]
    processor.append(ord("a"), candidates, 11.0)
    first = processor.take_output()
    processor.append(ord("b"), candidates, 12.0)
    assert (first.text, first.delta, first.token_ids, first.logprobs) == ("a", "a", [ord("a")], [candidates])
    assert first.metrics.tbt_s == []
    second = processor.take_output()
    assert (second.text, second.delta, len(second.logprobs or [])) == ("ab", "b", 2)


def test_logprobs_only_when_asked_for():
    processor = make()
    processor.append(ord("a"), [TokenLogprob(token_id=97, logprob=0.0, rank=1)], 11.0)
    assert processor.take_output().logprobs is None


def test_an_end_is_final():
    processor = make(max_tokens=1)
    with pytest.raises(AssertionError, match="not ended"):
        processor.take_output(final=True)
    feed(processor, "a")
    processor.fail("too late")
    assert (processor.finish_reason, processor.error) == ("length", None)
    with pytest.raises(AssertionError, match="after its end"):
        processor.append(ord("b"), None, 13.0)


def test_ended_before_the_first_token():
    processor = make(logprobs=0)
    processor.abort()
    output = processor.take_output(final=True)
    assert (output.text, output.token_ids, output.logprobs, output.metrics.ttft_s) == ("", [], [], None)
