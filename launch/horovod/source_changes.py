"""What is changed in Horovod's source: lost ranks, idle cycles, Open MPI 5, and ports that strangers could use."""

from pathlib import Path
from typing import NamedTuple


class Change(NamedTuple):
    """A text that occurs once in a file, and what replaces it."""

    file: str
    before: str
    after: str


_GLOBAL_STATE = "horovod/common/global_state.h"
_HTTP_STORE = "horovod/common/gloo/http_store.cc"
_OPERATIONS = "horovod/common/operations.cc"
_GLOO_RUN = "horovod/runner/gloo_run.py"
_HTTP_SERVER = "horovod/runner/http/http_server.py"
_LAUNCH = "horovod/runner/launch.py"
_MPI_RUN = "horovod/runner/mpi_run.py"
_TENSOR_QUEUE = "horovod/common/tensor_queue"

CHANGES = [
    # While ranks connect over Gloo, an exception in Horovod's thread (a rank was lost, or nobody answers) called
    # std::terminate. Now horovod_init fails, and can be called again.
    Change(
        _OPERATIONS,
        """\
  {
    global_gloo_context.Initialize(ParseGlooIface());
  }
  if (state.control_operation == LibType::GLOO) {
    // Initializes global controller
    state.process_set_table.Initialize(global_gloo_context);
  }
""",
        """\
  try {
    global_gloo_context.Initialize(ParseGlooIface());
    if (state.control_operation == LibType::GLOO) {
      // Initializes global controller
      state.process_set_table.Initialize(global_gloo_context);
    }
  } catch (const std::exception& ex) {
    LOG(ERROR) << "Horovod could not connect the ranks over Gloo: " << ex.what();
    if (state.control_operation == LibType::GLOO) {
      state.process_set_table.Finalize(global_gloo_context, SHUT_DOWN_ERROR);
    }
    global_gloo_context.Finalize();
    state.initialization_failed = true;
    return;
  }
""",
    ),
    Change(
        _OPERATIONS,
        """\
    // Reset initialization flag
    horovod_global.initialization_done = false;
""",
        """\
    // Reset initialization flag
    horovod_global.initialization_done = false;
    horovod_global.initialization_failed = false;
""",
    ),
    # After a failed collective, a rank went on to the next one over the connections that were left. Where the others
    # still waited for the failed one, Gloo took its message for part of that ("8 vs 4") and ended their processes.
    Change(
        _OPERATIONS,
        """\
  Status status;
  try {
    // process_set is passed here only for the case of Response::JOIN where
""",
        """\
  Status status;
  bool is_broken = false;
  try {
    // process_set is passed here only for the case of Response::JOIN where
""",
    ),
    Change(
        _OPERATIONS,
        """\
        << "ExecuteOperation Failed";
    status = Status::UnknownError(ex.what());
  }
""",
        """\
        << "ExecuteOperation Failed";
    status = Status::UnknownError(ex.what());
    is_broken = horovod_global.control_operation == LibType::GLOO;
  }
""",
    ),
    Change(
        _OPERATIONS,
        """\
      timeline.End(e.tensor_name, status.ok() ? e.output : nullptr);
      e.FinishWithCallback(status);
    }
  }
}
""",
        """\
      timeline.End(e.tensor_name, status.ok() ? e.output : nullptr);
      e.FinishWithCallback(status);
    }
  }
  if (is_broken) {
    // Ends the background loop, and with it the connections.
    throw std::runtime_error(status.reason());
  }
}
""",
    ),
    # Each cycle costs a message to all ranks. With one of 0.02 ms, two ranks that had nothing to reduce used half of
    # each of two cores. A rank without a tensor to reduce pauses now until it has one: for a twentieth of the time
    # since its last reduction, at most 5 ms. One whose tensors wait for other ranks pauses for a hundredth of that wait
    # from 1 ms on: otherwise MPI polls while the others pause.
    Change(
        _GLOBAL_STATE,
        """\
  std::chrono::steady_clock::time_point last_cycle_start;
""",
        """\
  std::chrono::steady_clock::time_point last_cycle_start;

  // Time point when the last collective operation ended.
  std::chrono::steady_clock::time_point last_operation_end;
""",
    ),
    Change(
        _OPERATIONS,
        """\
        LOG(TRACE, global_rank)
            << "Finished performing " << response.tensor_names_string();
""",
        """\
        LOG(TRACE, global_rank)
            << "Finished performing " << response.tensor_names_string();
        state.last_operation_end = std::chrono::steady_clock::now();
""",
    ),
    Change(
        _OPERATIONS,
        """\
  // This delay determines thread frequency and communication message latency
  auto start_time = std::chrono::steady_clock::now();
""",
        """\
  // This delay determines thread frequency and communication message latency
  auto start_time = std::chrono::steady_clock::now();
  const auto num_added = TensorQueue::NumAdded();
  bool has_tensors = false;
  for (auto process_set_id : state.process_set_table.Ids()) {
    has_tensors |= !state.process_set_table.Get(process_set_id).tensor_queue.IsEmpty();
  }
  const auto idle_time =
      start_time - std::max(state.last_operation_end, TensorQueue::LastAdded());
  const auto pause = std::min<std::chrono::nanoseconds>(
      idle_time / (has_tensors ? 100 : 20), std::chrono::milliseconds(5));
  if (!has_tensors || pause > std::chrono::milliseconds(1)) {
    TensorQueue::WaitForTensor(num_added, pause);
    start_time = std::chrono::steady_clock::now();
  }
""",
    ),
    Change(
        _TENSOR_QUEUE + ".h",
        """\
  void RemoveJoinTensor();
""",
        """\
  void RemoveJoinTensor();

  // Whether no tensor waits for its operation.
  bool IsEmpty() const;

  // The number of times that tensors were added to any queue, and when it was last.
  static uint64_t NumAdded();
  static std::chrono::steady_clock::time_point LastAdded();

  // Waits until NumAdded() is another number, at most this long.
  static void WaitForTensor(uint64_t num_added, std::chrono::nanoseconds timeout);
""",
    ),
    Change(_TENSOR_QUEUE + ".h", "#include <mutex>\n", "#include <chrono>\n#include <cstdint>\n#include <mutex>\n"),
    Change(
        _TENSOR_QUEUE + ".cc",
        """\
namespace common {

""",
        """\
namespace common {

namespace {
std::mutex added_mutex;
std::condition_variable added;
uint64_t num_times_added = 0;
std::chrono::steady_clock::time_point last_added;

void NoteAdded() {
  {
    std::lock_guard<std::mutex> guard(added_mutex);
    ++num_times_added;
    last_added = std::chrono::steady_clock::now();
  }
  added.notify_all();
}
} // namespace

bool TensorQueue::IsEmpty() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return tensor_table_.empty();
}

uint64_t TensorQueue::NumAdded() {
  std::lock_guard<std::mutex> guard(added_mutex);
  return num_times_added;
}

std::chrono::steady_clock::time_point TensorQueue::LastAdded() {
  std::lock_guard<std::mutex> guard(added_mutex);
  return last_added;
}

void TensorQueue::WaitForTensor(uint64_t num_added,
                                std::chrono::nanoseconds timeout) {
  std::unique_lock<std::mutex> lock(added_mutex);
  added.wait_for(lock, timeout, [&] { return num_times_added != num_added; });
}

""",
    ),
    Change(
        _TENSOR_QUEUE + ".cc",
        """\
  message_queue_.push(std::move(message));
  return Status::OK();
""",
        """\
  message_queue_.push(std::move(message));
  NoteAdded();
  return Status::OK();
""",
    ),
    Change(
        _TENSOR_QUEUE + ".cc",
        """\
    message_queue_.push(std::move(messages[i]));
  }
""",
        """\
    message_queue_.push(std::move(messages[i]));
  }
  NoteAdded();
""",
    ),
    Change(
        _TENSOR_QUEUE + ".cc",
        '#include "logging.h"\n',
        '#include <condition_variable>\n\n#include "logging.h"\n',
    ),
    # Its elastic mode listens on all interfaces, and executes what anybody sends (CVE-2024-10190).
    Change(
        _LAUNCH,
        """\
        return _run_elastic(args)
""",
        """\
        raise RuntimeError(
            "horovodrun must be used without --min-np and --host-discovery-script: in its elastic mode it executes "
            "what anybody sends to one of its ports (CVE-2024-10190). Use hvdtrain elastic MIN:MAX COMMAND."
        )
""",
    ),
    # The rendezvous of Gloo answered HEAD requests with the sizes and dates of files in its folder.
    Change(
        _HTTP_SERVER,
        "from http.server import HTTPServer, SimpleHTTPRequestHandler",
        "from http.server import BaseHTTPRequestHandler, HTTPServer",
    ),
    Change(_HTTP_SERVER, "KVStoreHandler(SimpleHTTPRequestHandler)", "KVStoreHandler(BaseHTTPRequestHandler)"),
    # It answered whoever reached it, so that anybody could replace the addresses of ranks.
    Change(
        _HTTP_STORE,
        """\
      http::Response response = request.send(method, body);
""",
        """\
      std::vector<std::string> headers;
      if (const char* token = std::getenv("HOROVOD_RENDEZVOUS_TOKEN")) {
        headers.push_back(std::string("Authorization: Bearer ") + token);
      }
      http::Response response = request.send(method, body, headers);
""",
    ),
    Change(_HTTP_STORE, "#include <cstring>\n", "#include <cstdlib>\n#include <cstring>\n"),
    Change(
        _HTTP_SERVER,
        """\
    # Override GET handler
""",
        """\
    # Requests without it are refused; empty: all are answered.
    token = ''

    def parse_request(self):
        if not super(KVStoreHandler, self).parse_request():
            return False
        received = self.headers.get('Authorization', '').encode()
        if self.token and not hmac.compare_digest(received, 'Bearer {}'.format(self.token).encode()):
            self.send_status_code(FORBIDDEN)
            return False
        return True

    # Override GET handler
""",
    ),
    Change(_HTTP_SERVER, "import collections\n", "import collections\nimport hmac\n"),
    Change(_HTTP_SERVER, "BAD_REQUEST = 400\n", "BAD_REQUEST = 400\nFORBIDDEN = 403\n"),
    # It listened on all interfaces, also where all ranks are on one host.
    Change(
        _HTTP_SERVER,
        """\
    def __init__(self, verbose=0):
        self._httpd = None
""",
        """\
    def __init__(self, verbose=0, address=''):
        self._address = address
        self._httpd = None
""",
    ),
    Change(
        _HTTP_SERVER,
        "                addr, handler_cls, self._verbose))",
        "                (self._address, addr[1]), handler_cls, self._verbose))",
    ),
    Change(
        _GLOO_RUN,
        """\
    rendezvous = RendezvousServer(settings.verbose)

    # allocate processes into slots
""",
        """\
    rendezvous = RendezvousServer(settings.verbose, server_ip)

    # allocate processes into slots
""",
    ),
    # Open MPI 5 knows only options with two dashes; 4.1, and MPICH's mpirun, take both.
    Change(_MPI_RUN, "['-bind-to none', '-map-by slot']", "['--bind-to none', '--map-by slot']"),
    # MPICH's mpirun names its process manager only.
    Change(_MPI_RUN, "elif 'MPICH' in output:", "elif 'MPICH' in output or 'HYDRA' in output:"),
]


def change(source: Path) -> None:
    """Changes Horovod's unpacked source.

    Raises:
        RuntimeError: it is another source than that the changes were written for.
    """
    for file, before, after in CHANGES:
        path = source / file
        text = path.read_text()
        if text.count(before) != 1:
            raise RuntimeError(f"{path} must contain once what hvdtrain changes in it. Received: another source.")
        path.write_text(text.replace(before, after))
