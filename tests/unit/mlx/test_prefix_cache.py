from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smg_grpc_servicer.mlx.prefix_cache import PrefixCache


@dataclass
class FakeLayer:
    """Stands for one layer's cache: what counts is how many tokens it holds."""

    offset: int
    trimmable: bool = True
    nbytes: int = 100
    most: int = 10**9

    def is_trimmable(self) -> bool:
        return self.trimmable

    def trim(self, count: int) -> int:
        count = min(count, self.most)
        self.offset -= count
        return count


def layers(tokens: list[int], **how: Any) -> list[FakeLayer]:
    return [FakeLayer(len(tokens), **how), FakeLayer(len(tokens), **how)]


def cache_of(budget: int = 10_000) -> PrefixCache:
    return PrefixCache(budget, lambda _: None)


def test_nothing_is_found_in_an_empty_cache() -> None:
    assert cache_of().lookup(list(range(100))) == (None, 0)


def test_one_token_of_the_prompt_is_always_left() -> None:
    cache, tokens = cache_of(), list(range(50))
    cache.insert(tokens, layers(tokens))
    found, shared = cache.lookup(tokens)
    assert shared == 49
    assert found is not None
    assert found[0].offset == 49


def test_a_longer_prompt_takes_all_that_is_kept() -> None:
    cache, tokens = cache_of(), list(range(50))
    cache.insert(tokens, layers(tokens))
    found, shared = cache.lookup([*tokens, 7, 8])
    assert shared == 50
    assert found is not None
    assert found[1].offset == 50


def test_a_fork_trims_a_copy_and_leaves_the_entry() -> None:
    cache, tokens = cache_of(), list(range(50))
    kept = layers(tokens)
    cache.insert(tokens, kept)
    found, shared = cache.lookup([*tokens[:30], 99, 99, 99])
    assert shared == 30
    assert found is not None
    assert found[0].offset == 30
    assert kept[0].offset == 50
    assert cache.lookup([*tokens, 1])[1] == 50


def test_a_short_common_start_is_not_worth_it() -> None:
    cache, tokens = cache_of(), list(range(50))
    cache.insert(tokens, layers(tokens))
    assert cache.lookup([*tokens[:15], *range(100, 150)]) == (None, 0)
    cache.insert(tokens[:10], layers(tokens[:10]))
    assert len(cache) == 1


def test_what_cannot_be_trimmed_serves_only_as_a_whole() -> None:
    cache, tokens = cache_of(), list(range(50))
    cache.insert(tokens, layers(tokens, trimmable=False))
    assert cache.lookup([*tokens[:30], 99, 99]) == (None, 0)
    assert cache.lookup(tokens) == (None, 0)
    assert cache.lookup([*tokens, 1])[1] == 50


def test_a_whole_prefix_serves_where_a_longer_one_cannot_be_trimmed() -> None:
    cache, tokens = cache_of(), list(range(50))
    cache.insert(tokens[:20], layers(tokens[:20], trimmable=False))
    cache.insert(tokens, layers(tokens, trimmable=False))
    assert len(cache) == 2
    assert cache.lookup([*tokens[:40], 99, 99])[1] == 20


def test_a_cache_that_gives_up_less_than_asked_is_not_used() -> None:
    cache, tokens = cache_of(), list(range(50))
    cache.insert(tokens, layers(tokens, most=5))
    assert cache.lookup([*tokens[:30], 99, 99]) == (None, 0)
    assert cache.lookup([*tokens[:47], 99, 99])[1] == 47


def test_an_entry_swallows_its_own_beginnings() -> None:
    cache, tokens = cache_of(), list(range(50))
    cache.insert(tokens[:20], layers(tokens[:20]))
    cache.insert(tokens, layers(tokens))
    assert (len(cache), cache.nbytes) == (1, 200)
    cache.insert(tokens[:30], layers(tokens[:30]))
    cache.insert(tokens, layers(tokens))
    assert (len(cache), cache.nbytes) == (1, 200)


def test_the_least_recently_used_goes_first() -> None:
    cache = cache_of(600)
    first, second, third, fourth = ([n * 100 + i for i in range(20)] for n in range(4))
    for tokens in (first, second, third):
        cache.insert(tokens, layers(tokens))
    assert cache.lookup([*first, 1])[1] == 20
    cache.insert(fourth, layers(fourth))
    assert cache.nbytes == 600
    assert cache.lookup([*second, 1]) == (None, 0)
    for tokens in (first, third, fourth):
        assert cache.lookup([*tokens, 1])[1] == 20


def test_what_is_larger_than_the_budget_is_not_kept_and_drives_nothing_out() -> None:
    cache, tokens = cache_of(250), list(range(50))
    cache.insert(tokens, layers(tokens))
    big = list(range(100, 150))
    cache.insert(big, layers(big, nbytes=126))
    assert (len(cache), cache.nbytes) == (1, 200)


def test_no_budget_is_off() -> None:
    cache, tokens = cache_of(0), list(range(50))
    cache.insert(tokens, layers(tokens))
    assert not cache.enabled
    assert len(cache) == 0


def test_only_what_is_kept_is_settled() -> None:
    settled: list[Any] = []
    cache, tokens = PrefixCache(200, settled.append), list(range(50))
    kept = layers(tokens)
    cache.insert(tokens, kept)
    cache.insert(tokens[:30], layers(tokens[:30]))
    cache.insert(tokens, layers(tokens, nbytes=10**6))
    assert settled == [kept]


def test_clear_lets_go_of_everything() -> None:
    cache, tokens = cache_of(), list(range(50))
    cache.insert(tokens, layers(tokens))
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)
    assert cache.lookup([*tokens, 1]) == (None, 0)
