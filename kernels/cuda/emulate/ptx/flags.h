// Memory that ranks share: `peer_memory` if it is set, otherwise the host's memory and clock.
#pragma once
#include <unistd.h>

#include <chrono>
#include <cstdint>

#include "../block.h"

namespace emulate::ptx {

template <class T>
T load_flag(const unsigned char* from, bool acquire) {
    auto* at = reinterpret_cast<const T*>(from);
    if constexpr (sizeof(T) >= 4) {
        if (!acquire) {
            return __atomic_load_n(at, __ATOMIC_RELAXED);
        }
        if constexpr (sizeof(T) == 8) {
            if (peer_memory != nullptr) {
                return peer_memory->load_acquire(at);
            }
        }
        // Who waits for another rank may have this one's core.
        thread_local uint32_t polls = 0;
        if (++polls % 32 == 0) {
            usleep(20);
        }
        return __atomic_load_n(at, __ATOMIC_ACQUIRE);
    }
    return *at;
}

template <class T>
void store_flag(unsigned char* to, T value, bool release) {
    auto* at = reinterpret_cast<T*>(to);
    if constexpr (sizeof(T) == 8) {
        if (release && peer_memory != nullptr) {
            peer_memory->store_release(at, value);
            return;
        }
    }
    if constexpr (sizeof(T) >= 4) {
        if (release) {
            __atomic_store_n(at, value, __ATOMIC_RELEASE);
        } else {
            __atomic_store_n(at, value, __ATOMIC_RELAXED);
        }
    } else {
        *at = value;
    }
}

inline uint64_t now_in_nanoseconds() {
    if (peer_memory != nullptr) {
        return peer_memory->nanoseconds();
    }
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
}

}  // namespace emulate::ptx
