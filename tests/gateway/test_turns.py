"""Tenants that share a process for their stages: the one that has computed least comes first."""

from __future__ import annotations

import asyncio

from tailrace.watch.gateway.turns import CpuUse, Turns


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_what_is_long_ago_counts_less() -> None:
    now = [0.0]
    use = CpuUse(lambda: now[0])
    use.add("a", 8.0)
    assert use.of("a") == 8.0
    now[0] = 60.0
    assert use.of("a") == 4.0
    use.add("a", 1.0)
    assert use.of("a") == 5.0
    assert use.of("b") == 0.0


def test_whoever_has_computed_least_comes_first() -> None:
    """Requests were carried out in the order in which they came: a hundred of one tenant before the first of
    another."""

    async def work() -> list[str]:
        use = CpuUse(lambda: 0.0)
        turns, order = Turns(use), list[str]()

        async def step(tenant: str) -> None:
            await turns.take(tenant)
            order.append(tenant)
            await asyncio.sleep(0)
            use.add(tenant, 1.0)
            turns.give()

        tasks = [asyncio.create_task(step("greedy")) for _ in range(20)]
        await settled()
        assert not turns.others_wait
        tasks += [asyncio.create_task(step("modest")) for _ in range(3)]
        await asyncio.gather(*tasks)
        assert not turns.is_taken
        return order

    order = asyncio.run(work())
    assert sorted(order) == ["greedy"] * 20 + ["modest"] * 3
    last = max(place for place, tenant in enumerate(order) if tenant == "modest")
    assert last < 12, order


def test_who_gives_up_his_turn_before_it_comes_holds_up_nobody() -> None:
    async def work() -> None:
        turns = Turns(CpuUse())
        await turns.take("a")
        first, second = asyncio.create_task(turns.take("b")), asyncio.create_task(turns.take("c"))
        await settled()
        assert turns.others_wait
        turns.give()  # to the first, which is cancelled before it notices
        first.cancel()
        await settled()
        assert second.done()
        assert turns.holder == "c"
        turns.give()
        assert not turns.is_taken

    asyncio.run(work())
