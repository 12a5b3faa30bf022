// Kernels that show what the emulation notices, and what it lets pass: see rules.cu. Each takes a
// buffer of words.
#pragma once
#include <cstdint>

void one_block_waits(uint32_t* words);
void no_block_waits(uint32_t* words);
void half_of_a_block_waits(uint32_t* words);
void a_block_writes_that_does_not_wait(uint32_t* words);
void it_writes_before_it_waits(uint32_t* words);

void threads_read_what_others_wrote_behind_a_barrier(uint32_t* words);
void threads_read_what_others_wrote(uint32_t* words);
void threads_overwrite_what_others_read(uint32_t* words);
void lanes_read_what_others_wrote_behind_a_warp_barrier(uint32_t* words);
void lanes_read_what_others_wrote_behind_a_shuffle(uint32_t* words);
void warps_read_what_others_wrote_behind_a_warp_barrier(uint32_t* words);
void threads_add_atomically(uint32_t* words);
void a_thread_reads_what_others_add_atomically(uint32_t* words);
void a_copy_arrives_while_others_read(uint32_t* words);
void blocks_write_what_others_read(uint32_t* words);
void blocks_write_words_of_their_own(uint32_t* words);
