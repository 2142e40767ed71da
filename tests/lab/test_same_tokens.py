"""Whether both arms said the same."""

from __future__ import annotations

from ab_made_up import sample

from gapless.lab.same_tokens import compare_tokens, first_difference


def test_equal_ids_and_equal_texts():
    with_ids = [sample(k, ids=[k, 7]) for k in range(3)]
    found = compare_tokens([(5, with_ids, list(reversed(with_ids)))])
    assert found == {"compared": 3, "differ": 0, "by": "token ids", "first": None, "not_compared": 0}
    plain = [sample(k) for k in range(3)]
    texts = compare_tokens([(5, plain, plain), (6, plain, plain)])
    assert texts == {"compared": 6, "differ": 0, "by": "text", "first": None, "not_compared": 0}


def test_one_other_token_of_one_prompt_is_found():
    a = [sample(k, ids=[1, 2, 3], text="same") for k in range(4)]
    b = [*a[:2], sample(2, ids=[1, 9, 3], text="same"), a[3]]
    found = compare_tokens([(5, a, a), (6, a, b)])
    assert (found["compared"], found["differ"]) == (8, 1)
    assert found["first"] == {"seed": 6, "place": 2, "at": 1, "a": "2", "b": "9"}


def test_a_shorter_answer_differs_where_it_ends():
    assert first_difference(sample(0, text="abc"), sample(0, text="ab")) == {"at": 2, "a": "c", "b": ""}
    assert first_difference(sample(0, ids=[1]), sample(0, ids=[1, 2])) == {"at": 1, "a": "", "b": "2"}
    # Ids of one side alone say nothing: the texts are compared.
    assert first_difference(sample(0, ids=[1], text="x"), sample(0, text="x")) is None


def test_failed_answers_are_not_compared():
    a = [sample(0), sample(1, error="gone")]
    b = [sample(0, text="other"), sample(1), sample(2)]
    found = compare_tokens([(1, a, b)])
    assert (found["compared"], found["differ"], found["not_compared"]) == (1, 1, 1)
