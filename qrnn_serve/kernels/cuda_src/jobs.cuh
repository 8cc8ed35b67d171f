// The jobs of a block.
#pragma once

#include "sequences.cuh"

// Gives them one by one, to the one thread that asks; in the block's memory, since the others need
// the registers. `backwards`: the last tiles come first.
//
// A block that claims tiles may wait for tiles that were claimed before: of all jobs that are not
// done, the first one claimed waits for none, and its block has nothing else to do.
template <int V>
struct Jobs {
    // Of the sequence at hand, where a block takes whole ones.
    int64 item, sequence, timesteps, first_row, tiles, done;
    bool valid;

    __device__ void begin() {
        item = block_of_grid();
        tiles = done = 0;
    }

    // `ticket`: what was claimed, where blocks claim tiles.
    __device__ Job next(const Sequences& s, const Work& work, bool backwards, uint64 ticket) {
        return work.words ? claimed_tile(s, work, backwards, ticket)
                          : following_tile(s, work, backwards);
    }

    __device__ static Job claimed_tile(const Sequences& s, const Work& work, bool backwards,
                                       uint64 ticket) {
        Job job;
        job.count = kNoJob;
        if (ticket >= (uint64)work.items) return job;
        const unsigned item = (unsigned)(backwards ? work.items - 1 - (int64)ticket : ticket);
        const unsigned index = quotient(item, work.by_channel_tiles);
        job.channel = channel_of(work, item, index);
        job.slot = index;
        if (s.offsets) {
            const Slot slot = work.slots[index];
            job.slot = slot.slot;
            if (slot.slot == kNoSlot) job.channel = s.hidden;  // past all channels
            job.sequence = slot.sequence;
            job.row = slot.row;
            job.count = slot.count;
            job.before = slot.before;
            job.after = slot.after;
            job.flags = slot.flags;
        } else {
            const unsigned tile = quotient(index, work.by_batch);
            const int64 begin = (int64)tile * kTile;
            job.sequence = index - tile * (unsigned)s.batch;
            job.row = s.reverse ? s.timesteps - 1 - begin : begin;
            job.count = (int)clamp(s.timesteps - begin, 0, kTile);
            job.before = (int)tile;
            job.after = (int)work.tiles_each - 1 - job.before;
            job.flags = kValid;
        }
        return job;
    }

    __device__ Job following_tile(const Sequences& s, const Work& work, bool backwards) {
        Job job;
        job.count = kNoJob;
        if (done == tiles) {
            if (tiles > 0) item += blocks_of_grid();
            if (item >= work.items) return job;
            const unsigned index = quotient((unsigned)item, work.by_channel_tiles);
            const Line line(s, index);
            sequence = index;
            timesteps = line.count;
            first_row = line.first_row;
            valid = line.valid;
            tiles = tiles_of(timesteps);
            done = 0;
        }
        const int64 tile = backwards ? tiles - 1 - done : done;
        ++done;
        job.channel = channel_of(work, (unsigned)item, (unsigned)sequence);
        job.sequence = sequence;
        job.slot = first_slot(s, sequence) + tile * slot_step(s);
        job.row = first_row + (s.reverse ? -tile : tile) * kTile;
        job.count = (int)clamp(timesteps - tile * kTile, 0, kTile);
        job.before = (int)tile;
        job.after = (int)(tiles - 1 - tile);
        job.flags = valid ? kValid : 0;
        return job;
    }

    __device__ static int64 channel_of(const Work& work, unsigned item, unsigned index) {
        return (int64)(item - index * (unsigned)work.channel_tiles) * (32 * V);
    }
};
