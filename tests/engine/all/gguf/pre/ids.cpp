// Prints a checksum of the ids that llama.cpp gives each text: ids VOCABULARY.gguf TEXTS, where texts have their length before them.
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "llama.h"

int main(int, char **argv) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    llama_model *model = llama_model_load_from_file(argv[1], params);
    if (!model) return 1;
    const llama_vocab *vocab = llama_model_get_vocab(model);
    std::ifstream file(argv[2], std::ios::binary);
    std::string all((std::istreambuf_iterator<char>(file)), {});
    for (size_t at = 0; at < all.size();) {
        uint32_t n = 0;
        for (int i = 0; i < 4; i++) n |= (uint32_t)(uint8_t)all[at + i] << 8 * i;
        std::vector<llama_token> ids(n + 8);
        int count = llama_tokenize(vocab, all.data() + at + 4, n, ids.data(), ids.size(), false, false);
        uint64_t hash = 14695981039346656037u; // FNV-1a of the ids, little-endian
        for (int i = 0; i < count; i++)
            for (int b = 0; b < 4; b++) hash = (hash ^ (uint8_t)(ids[i] >> 8 * b)) * 1099511628211u;
        printf("%016llx\n", (unsigned long long)hash);
        at += 4 + n;
    }
}
