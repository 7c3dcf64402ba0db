"""The settings that the broker shares with its learners. [pure]"""

from __future__ import annotations

from narrows.broker.config import BrokerConfig
from narrows.proto.flow import message_bytes
from narrows.proto.messages import RunSettings


def settings(config: BrokerConfig) -> RunSettings:
    """The settings that the whole group shares, as a Welcome carries them."""
    wan, count = config.wan, config.run.learners_at_start
    # Paired with FragmentsSection and with the learner, which waits beyond the overlap.
    assert config.fragments.overlap_steps < config.fragments.sync_period_steps, config.fragments
    return RunSettings(
        mode=config.run.mode,
        fragment_count=config.fragments.count,
        sync_period_steps=config.fragments.sync_period_steps,
        overlap_steps=config.fragments.overlap_steps,
        push_codec=config.codec.push,
        publish_codec=config.codec.publish,
        push_rho=config.codec.push_rho,
        publish_rho=config.codec.publish_rho,
        push_bits=config.codec.push_bits,
        publish_bits=config.codec.publish_bits,
        chunk_elements=config.codec.chunk_elements,
        message_bytes=message_bytes(wan.up, wan.down, wan.total_up / count, wan.total_down / count),
        streams=wan.streams,
        error_feedback=config.codec.error_feedback,
        tokens_per_run_step=config.run.tokens_per_run_step,
        goal_tokens=config.run.goal_tokens,
        max_offline_s=config.run.max_offline,
    )
