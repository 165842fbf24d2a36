// Threads: borrowed from a running OpenMP library (torch's own) or from a small pool.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// Awake for a moment, since others are about to finish; then leaving the core to other work.
template <class Done>
void wait_until(Done done) {
    for (int spins = 0; !done(); spins++) spins < 4000 ? pause() : std::this_thread::yield();
}

// Threads that work on one call. The last to arrive at a barrier does what comes between two stages.
class Team {
  public:
    explicit Team(int size) : size(size) {}

    template <class Between>
    void barrier(Between between) {
        const unsigned turn = turns.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.store(0, std::memory_order_relaxed);
            next.store(0, std::memory_order_relaxed);
            between();
            turns.store(turn + 1, std::memory_order_release);
            return;
        }
        wait_until([&] { return turns.load(std::memory_order_acquire) != turn; });
    }

    // The next task of this stage that no thread has taken.
    int64_t claim() { return next.fetch_add(1, std::memory_order_relaxed); }

    int size;

  private:
    std::atomic<int> arrived{0};
    std::atomic<unsigned> turns{0};
    std::atomic<int64_t> next{0};
};

using Body = void (*)(void* call, Team& team);

// What a borrowed library offers: run a function on all its threads, and tell a thread how many there are.
using RunAll = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);
using CountThreads = int (*)();

struct Shared {
    Body body;
    void* call;
    Team* team;
    CountThreads count;
    std::atomic<int> entered{0};
};

inline void enter_borrowed(void* data) {
    auto& shared = *static_cast<Shared*>(data);
    // fewer threads than wanted may have come: all wait until one has told the team its size
    if (shared.entered.fetch_add(1) == 0) {
        shared.team->size = shared.count();
        shared.entered.fetch_add(1 << 16);
    }
    wait_until([&] { return shared.entered.load(std::memory_order_acquire) >= 1 << 16; });
    shared.body(shared.call, *shared.team);
}

// Workers that sleep between calls, after a moment of waiting awake.
class Pool {
  public:
    void run(int threads, Body body, void* call) {
        std::unique_lock<std::mutex> lock(mutex);
        try {
            while (started < threads - 1) start();
        } catch (const std::system_error&) {  // the system gives no more
            threads = started + 1;
        }
        Team team(threads);
        this->body = body, this->call = call, this->team = &team, wanted = threads - 1;
        busy.store(threads - 1, std::memory_order_relaxed);
        turn.fetch_add(1, std::memory_order_release);
        lock.unlock();
        wake.notify_all();
        body(call, team);
        wait_until([&] { return busy.load(std::memory_order_acquire) == 0; });
    }

  private:
    void start() {
        const int index = started;
        std::thread([this, index] { work(index); }).detach();
        started++;
    }

    void work(int index) {
        unsigned seen = 0;
        for (;;) {
            for (int spins = 0; spins < 2000 && turn.load(std::memory_order_acquire) == seen; spins++) pause();
            Body body;
            void* call;
            Team* team;
            {
                std::unique_lock<std::mutex> lock(mutex);
                wake.wait(lock, [&] { return turn.load(std::memory_order_relaxed) != seen; });
                seen = turn.load(std::memory_order_relaxed);
                if (index >= wanted) continue;
                body = this->body, call = this->call, team = this->team;
            }
            body(call, *team);
            busy.fetch_sub(1, std::memory_order_release);
        }
    }

    std::mutex mutex;
    std::condition_variable wake;
    std::atomic<unsigned> turn{0};
    std::atomic<int> busy{0};
    int started = 0, wanted = 0;
    Body body = nullptr;
    void* call = nullptr;
    Team* team = nullptr;
};

// One call at a time has the threads; others run alone meanwhile. A forked child starts anew: its parent's
// threads do not exist there, and what they held is left behind.
class Threads {
  public:
    static Threads& instance() {
        static Threads* threads = make();
        return *threads;
    }

    void run(int threads, Body body, void* call) {
        std::unique_lock<std::mutex> lock(*mutex, std::try_to_lock);
        if (threads <= 1 || !lock.owns_lock()) {
            Team team(1);
            body(call, team);
        } else if (run_all) {
            Team team(threads);
            Shared shared{body, call, &team, count, {}};
            run_all(enter_borrowed, &shared, unsigned(threads), 0);
        } else {
            pool->run(threads, body, call);
        }
    }

    void borrow(RunAll all, CountThreads counter) {
        std::lock_guard<std::mutex> lock(*mutex);
        run_all = all, count = counter;
    }

  private:
    static Threads* make() {
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, [] { instance().forget(); });
#endif
        return new Threads;  // never freed: detached workers may outlive everything else
    }

    void forget() { mutex = new std::mutex, pool = new Pool, run_all = nullptr; }

    std::mutex* mutex = new std::mutex;
    Pool* pool = new Pool;
    RunAll run_all = nullptr;
    CountThreads count = nullptr;
};

}  // namespace
