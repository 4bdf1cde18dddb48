// What ONNX Runtime looks for in a library of operators.
#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime.h"

extern "C" __attribute__((visibility("default"))) OrtStatus *RegisterCustomOps(
    OrtSessionOptions *options, const OrtApiBase *base);

OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  using namespace mha_onnx;
  const OrtApi *api = base->GetApi(kApiVersion);
  if (!api) {
    const std::string sentence = "mha's operators need ONNX Runtime 1." +
                                 std::to_string(kApiVersion) + " or newer; this is " +
                                 base->GetVersionString();
    return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, sentence.c_str());
  }
  // Domains live as long as the process, as the tables in them do: sessions are made of the options
  // at any later time. One for each ONNX Runtime that the process has loaded.
  static std::mutex mutex;
  static std::vector<std::pair<const OrtApi *, OrtCustomOpDomain *>> domains;
  return guarded(*api, "mha: ", [&] {
    // ONNX Runtime refuses a session whose options name a domain twice, and tells nobody which they
    // name: an entry of theirs does.
    constexpr const char *kEntry = "mha.operators";
    int is_registered = 0;
    check(*api, api->HasSessionConfigEntry(options, kEntry, &is_registered));
    if (is_registered) return;
    const std::lock_guard<std::mutex> lock(mutex);
    auto found = std::find_if(domains.begin(), domains.end(),
                              [&](const auto &entry) { return entry.first == api; });
    if (found == domains.end()) {
      OrtCustomOpDomain *domain;
      check(*api, api->CreateCustomOpDomain("mha", &domain));
      try {
        for (const OrtCustomOp *op :
             {attention_operator(), grouped_query_operator(), layer_operator(),
              linear_attention_operator(), causal_conv_operator()}) {
          check(*api, api->CustomOpDomain_Add(domain, op));
        }
        found = domains.emplace(found, api, domain);
      } catch (...) {  // the next call begins anew
        api->ReleaseCustomOpDomain(domain);
        throw;
      }
    }
    check(*api, api->AddCustomOpDomain(options, found->second));
    check(*api, api->AddSessionConfigEntry(options, kEntry, "1"));
  });
}
